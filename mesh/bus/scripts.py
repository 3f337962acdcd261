"""The Lua scripts. Each works on keys of one hash tag only and runs on Redis 7.0 and later."""

from __future__ import annotations

TAKE = """
-- KEYS: request streams, most urgent first.
-- ARGV: group, consumer, entries wanted, idle milliseconds after which another's entry is claimed (0: none).
-- Returns {index of stream, entry id, payload} per entry taken. Entries past their time are deleted.
local group, consumer, wanted, claim_idle = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local taken = {}

local function accept(index, entry)
  local id, fields = entry[1], entry[2]
  local added = tonumber(string.match(id, '^%d+'))
  if added + tonumber(fields[4]) < now then
    redis.call('XACK', KEYS[index], group, id)
    redis.call('XDEL', KEYS[index], id)
  else
    taken[#taken + 1] = {index - 1, id, fields[2]}
  end
end

if claim_idle > 0 then
  for index, key in ipairs(KEYS) do
    if #taken >= wanted then return taken end
    local claimed = redis.call('XAUTOCLAIM', key, group, consumer, claim_idle, '0', 'COUNT', wanted - #taken)
    for _, entry in ipairs(claimed[2]) do
      if entry and entry[2] then accept(index, entry) end
    end
  end
end
for index, key in ipairs(KEYS) do
  while #taken < wanted do
    local count = wanted - #taken
    local read = redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', count, 'STREAMS', key, '>')
    if not read then break end
    for _, entry in ipairs(read[1][2]) do accept(index, entry) end
  end
end
return taken
"""

PUT_BACK = """
-- KEYS: one request stream. ARGV: group, entry id.
-- Gives an entry that this consumer holds back to the queue, at its end.
local entry = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2])[1]
if not entry then return 0 end
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('XADD', KEYS[1], '*', unpack(entry[2]))
return 1
"""

RENEW_LEASE = """
-- KEYS: clock, info. ARGV: id, time to live in milliseconds, info.
local time = redis.call('TIME')
redis.call('ZADD', KEYS[1], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[2], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[3])
return 1
"""

LIVE_LEASES = """
-- KEYS: clock, info. Removes what has run out, then returns id, info, id, info, ...
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local gone = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)
if #gone > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
  redis.call('HDEL', KEYS[2], unpack(gone))
end
return redis.call('HGETALL', KEYS[2])
"""
