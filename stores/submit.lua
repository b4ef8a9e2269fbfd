-- Append a job once, even if the command is sent twice because the first answer was lost.
--
-- KEYS[1]  stream of jobs
-- KEYS[2]  id that this submission got, kept for a moment
-- ARGV[1]  milliseconds to keep it
-- ARGV[2...]  fields and values of the job
--
-- Returns the job id.

local known = redis.call('GET', KEYS[2])
if known then
  return known
end
local id = redis.call('XADD', KEYS[1], '*', unpack(ARGV, 2))
redis.call('SET', KEYS[2], id, 'PX', ARGV[1])
return id
