-- Renew claims: their idle time starts again, their delivery number stays.
--
-- KEYS[1]  stream of jobs
-- ARGV[1]  consumer group      ARGV[2]  consumer
-- ARGV[3...]  pairs of job id and delivery number of the claim
--
-- Returns the ids of claims that somebody else holds now.
--
-- A job whose entry was trimmed is left alone: XCLAIM would forget it without a record. It goes stale and is
-- recorded as lost, unless its worker finishes first.

local lost = {}
for i = 3, #ARGV, 2 do
  local id = ARGV[i]
  local held = redis.pcall('XPENDING', KEYS[1], ARGV[1], id, id, 1)
  if held.err == nil and #held > 0 then
    if held[1][2] ~= ARGV[2] or held[1][4] ~= tonumber(ARGV[i + 1]) then
      lost[#lost + 1] = id
    elseif #redis.call('XRANGE', KEYS[1], id, id) > 0 then
      redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, id, 'JUSTID')
    end
  end
end
return lost
