-- Give a claim back so that the next worker takes it over at once, as if this delivery had not been.
--
-- KEYS[1]  stream of jobs
-- ARGV[1]  consumer group      ARGV[2]  job id
-- ARGV[3]  consumer            ARGV[4]  delivery number of the claim
-- ARGV[5]  consumer name that holds what was handed back
--
-- Returns 1 when handed back, 0 when the claim was lost.
--
-- The last delivery is dated to the beginning of time, so that the claim is stale for everybody.

local held = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[2], ARGV[2], 1)
if held.err ~= nil or #held == 0 or held[1][2] ~= ARGV[3] or held[1][4] ~= tonumber(ARGV[4]) then
  return 0
end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[5], 0, ARGV[2],
  'TIME', 1, 'RETRYCOUNT', tonumber(ARGV[4]) - 1, 'JUSTID')
return 1
