-- Forget consumers that hold nothing and have not been seen for long: dead workers whose names never return.
--
-- KEYS[1]  stream of jobs
-- ARGV[1]  consumer group      ARGV[2]  milliseconds since it was last seen
--
-- Returns how many were forgotten.

local forgotten = 0
local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])
if consumers.err ~= nil then
  return 0
end
for _, fields in ipairs(consumers) do
  local named = {}
  for i = 1, #fields, 2 do
    named[fields[i]] = fields[i + 1]
  end
  if named['pending'] == 0 and named['idle'] >= tonumber(ARGV[2]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], named['name'])
    forgotten = forgotten + 1
  end
end
return forgotten
