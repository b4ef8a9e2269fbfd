-- Give a job up: keep its fields among the dead letters, write its failed outcome, end its claim; one step.
--
-- KEYS[1]  stream of jobs
-- KEYS[2]  outcome of this job
-- KEYS[3]  stream of dead letters
-- ARGV[1]  consumer group      ARGV[2]  job id
-- ARGV[3]  consumer            ARGV[4]  delivery number of the claim
-- ARGV[5]  outcome as JSON     ARGV[6]  milliseconds the outcome is kept
-- ARGV[7]  channel that announces outcomes
-- ARGV[8]  reason              ARGV[9]  dead letters kept, about
--
-- Returns 1 when done, 0 when the claim was lost.

local held = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[2], ARGV[2], 1)
if held.err ~= nil or #held == 0 or held[1][2] ~= ARGV[3] or held[1][4] ~= tonumber(ARGV[4]) then
  return 0
end
local letter = {'job_id', ARGV[2], 'reason', ARGV[8], 'deliveries', ARGV[4]}
local entry = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2])
if #entry > 0 then
  for _, word in ipairs(entry[1][2]) do
    letter[#letter + 1] = word
  end
end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[9], '*', unpack(letter))
redis.call('SET', KEYS[2], ARGV[5], 'PX', ARGV[6])
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('PUBLISH', ARGV[7], ARGV[2])
return 1
