-- Take over claims whose workers fell silent, and record the jobs among them whose entry is gone as lost.
--
-- KEYS[1]  stream of jobs
-- ARGV[1]  consumer group      ARGV[2]  consumer that takes over
-- ARGV[3]  milliseconds of silence after which a claim is stale
-- ARGV[4]  id to go on from    ARGV[5]  most claims to take over
-- ARGV[6]  prefix of outcome keys; the job id follows
-- ARGV[7]  milliseconds an outcome is kept
-- ARGV[8]  channel that announces outcomes
-- ARGV[9]  outcome 'lost' as JSON, in which '@' stands for the job id
--
-- Returns {id to go on from, {{job id, delivery number, {field, value, ...}}, ...}, {lost job id, ...}}.
--
-- XAUTOCLAIM forgets entries that were trimmed or deleted; here the forgetting and its record are one step.

local taken = redis.call('XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], 'COUNT', ARGV[5])
local claims = {}
for _, entry in ipairs(taken[2]) do
  local held = redis.call('XPENDING', KEYS[1], ARGV[1], entry[1], entry[1], 1)
  claims[#claims + 1] = {entry[1], held[1][4], entry[2]}
end
for _, id in ipairs(taken[3]) do
  local outcome = string.gsub(ARGV[9], '@', id)
  redis.call('SET', ARGV[6] .. id, outcome, 'PX', ARGV[7], 'NX')
  redis.call('PUBLISH', ARGV[8], id)
end
return {taken[1], claims, taken[3]}
