-- Write a job's outcome and end its claim, unless the claim was lost.
--
-- KEYS[1]  stream of jobs
-- KEYS[2]  outcome of this job
-- ARGV[1]  consumer group      ARGV[2]  job id
-- ARGV[3]  consumer            ARGV[4]  delivery number of the claim
-- ARGV[5]  outcome as JSON     ARGV[6]  milliseconds the outcome is kept
-- ARGV[7]  channel that announces outcomes
--
-- Returns 1 when the outcome was written, 0 when the claim was lost.
--
-- The claim is lost when someone else holds the job, or when it has its outcome already. A job that nobody holds
-- (the group was destroyed, the store came back empty) is not lost: this result is the only one there is. An outcome
-- 'lost' gives way to a real one.

local held = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[2], ARGV[2], 1)
if held.err == nil and #held > 0 then
  if held[1][2] ~= ARGV[3] or held[1][4] ~= tonumber(ARGV[4]) then
    return 0
  end
else
  local known = redis.call('GET', KEYS[2])
  if known and cjson.decode(known)['status'] ~= 'lost' then
    return 0
  end
end
redis.call('SET', KEYS[2], ARGV[5], 'PX', ARGV[6])
redis.pcall('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('PUBLISH', ARGV[7], ARGV[2])
return 1
