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

WAITING = """
-- KEYS: request streams of one model. Returns how many entries they hold, and the age of the oldest in
-- milliseconds by Redis's own clock, which made their ids.
local count, oldest = 0, nil
for _, key in ipairs(KEYS) do
  local first = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
  if first then
    count = count + redis.call('XLEN', key)
    local added = tonumber(string.match(first[1], '^%d+'))
    oldest = math.min(oldest or added, added)
  end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
return {count, oldest and math.max(0, now - oldest) or 0}
"""

REMOVE = """
-- KEYS: the stream of each entry. ARGV: group, entry ids. Both at once, so that no acknowledged entry is left
-- behind (Redis 8.2's XACKDEL would do it; Valkey does not know it). Harmless to repeat.
for index, key in ipairs(KEYS) do
  redis.call('XACK', key, ARGV[1], ARGV[index + 1])
  redis.call('XDEL', key, ARGV[index + 1])
end
"""

_MOVE = """
local function move_to_end(key, group, id)
  local entry = redis.call('XRANGE', key, id, id)[1]
  redis.call('XACK', key, group, id)
  if not entry then return end
  redis.call('XDEL', key, id)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local expires = tonumber(string.match(id, '^%d+')) + tonumber(entry[2][4])
  redis.call('XADD', key, '*', 'request', entry[2][2], 'ttl_ms', math.max(1, expires - now))
end
"""

PUT_BACK = f"""
-- KEYS: the stream of an entry. ARGV: group, entry id.
-- Puts it at the stream's end for others to take; it gets a new id and keeps its deadline.
{_MOVE}
move_to_end(KEYS[1], ARGV[1], ARGV[2])
"""

CLOSE_CONSUMER = f"""
-- KEYS: a request stream. ARGV: group, consumer.
-- Puts back what the consumer holds and removes the consumer, which alone would drop what it holds.
{_MOVE}
local key, group, consumer = KEYS[1], ARGV[1], ARGV[2]
if redis.call('EXISTS', key) == 0 then return end
repeat
  local held = redis.pcall('XPENDING', key, group, '-', '+', 100, consumer)
  if held.err then break end
  for _, item in ipairs(held) do move_to_end(key, group, item[1]) end
until #held == 0
redis.pcall('XGROUP', 'DELCONSUMER', key, group, consumer)
"""

IS_PRESENT = """
-- KEYS: one request stream. ARGV: entry id. Whether the entry is there, without sending what is in it.
return #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])
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
for _, id in ipairs(gone) do
  redis.call('ZREM', KEYS[1], id)
  redis.call('HDEL', KEYS[2], id)
end
return redis.call('HGETALL', KEYS[2])
"""
