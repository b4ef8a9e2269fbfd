-- What is unfinished in one queue. A constant number of constant-time steps, however long the stream is.
--
-- KEYS[1]  stream of jobs
-- ARGV[1]  consumer group
--
-- Returns {length, group exists (1/0), lag (-1: unknown), pending, consumers, id of the oldest undelivered job ('': none),
--          id of the oldest pending job ('': none), {seconds, microseconds} of the store's clock}.

local length = redis.call('XLEN', KEYS[1])
local now = redis.call('TIME')
local groups = redis.pcall('XINFO', 'GROUPS', KEYS[1])
local group = nil
if groups.err == nil then
  for _, fields in ipairs(groups) do
    local named = {}
    for i = 1, #fields, 2 do
      named[fields[i]] = fields[i + 1]
    end
    if named['name'] == ARGV[1] then
      group = named
    end
  end
end

local after = '-'
if group then
  after = '(' .. group['last-delivered-id']
end
local undelivered = ''
if length > 0 then
  local entries = redis.call('XRANGE', KEYS[1], after, '+', 'COUNT', 1)
  if #entries > 0 then
    undelivered = entries[1][1]
  end
end
if not group then
  return {length, 0, length, 0, 0, undelivered, '', now}
end

local summary = redis.call('XPENDING', KEYS[1], ARGV[1])
local pending = ''
if summary[1] > 0 then
  pending = summary[2]
end
return {length, 1, group['lag'] or -1, summary[1], group['consumers'], undelivered, pending, now}
