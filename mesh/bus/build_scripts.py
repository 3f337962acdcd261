"""The Lua scripts of builds. All their keys share one hash tag; they run on Redis 7.0 and later."""

from __future__ import annotations

_HELD = """
-- Whether the consumer in ARGV[2] holds the entry in ARGV[3] of the job stream KEYS[1].
local function is_held()
  local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)
  return not pending.err and pending[1] and pending[1][2] == ARGV[2]
end
"""

_END = """
-- Writes a build's last state and removes what only a running build needs.
local function finish(entry, build, state, keep_s)
  redis.call('XADD', KEYS[2], '*', 'state', state, 'done', '1')
  redis.call('EXPIRE', KEYS[2], keep_s)
  if entry then
    redis.call('XACK', KEYS[1], ARGV[1], entry)
    redis.call('XDEL', KEYS[1], entry)
  end
  redis.call('DEL', KEYS[3])
  if redis.call('GET', KEYS[4]) == build then redis.call('DEL', KEYS[4]) end
end
"""

CREATE = """
-- KEYS: request, in flight, all builds, job stream, log of the new build.
-- ARGV: new build id, digest of what is asked for, whether the client gave a request id (0 or 1),
--   seconds that the request id is remembered, prefix of log keys, job, first state.
-- Returns the id of the new build, or of the one that answers this call already, and the digest of what
-- that one was asked for.
local function is_known(id) return id and redis.call('EXISTS', ARGV[5] .. id) == 1 end

if ARGV[3] == '1' then
  local id, digest = string.match(redis.call('GET', KEYS[1]) or '', '^(%S+) (%S+)$')
  if is_known(id) then return {id, digest} end
end
local id = redis.call('GET', KEYS[2])
if not is_known(id) then
  id = ARGV[1]
  local time = redis.call('TIME')
  redis.call('ZADD', KEYS[3], time[1] * 1000 + math.floor(time[2] / 1000), id)
  redis.call('XADD', KEYS[5], '*', 'state', ARGV[7], 'done', '0')
  redis.call('XADD', KEYS[4], '*', 'build', id, 'job', ARGV[6])
  redis.call('SET', KEYS[2], id)
end
if ARGV[3] == '1' then redis.call('SET', KEYS[1], id .. ' ' .. ARGV[2], 'EX', ARGV[4]) end
return {id, ARGV[2]}
"""

HOLD = f"""
-- KEYS: job stream, log, cancel. ARGV: group, consumer, entry id, state (empty: unchanged), states kept.
-- Renews a consumer's hold on a job and may write a new state.
-- Returns 0 if another has the job, 1 if it is held, 2 if it is held and should be cancelled.
{_HELD}
if not is_held() then return 0 end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'JUSTID')
if ARGV[4] ~= '' then
  redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[5], '*', 'state', ARGV[4], 'done', '0')
end
return 1 + redis.call('EXISTS', KEYS[3])
"""

FINISH = f"""
-- KEYS: job stream, log, cancel, in flight. ARGV: group, consumer, entry id, build id, state, seconds kept.
-- Returns 0, and does nothing, if another has the job.
{_HELD}{_END}
if not is_held() then return 0 end
finish(ARGV[3], ARGV[4], ARGV[5], ARGV[6])
return 1
"""

GIVE_BACK = f"""
-- KEYS: job stream, log. ARGV: group, consumer, entry id, state (empty: unchanged).
-- Puts a job back into its queue, at the end. Returns 0, and does nothing, if another has it.
{_HELD}
if not is_held() then return 0 end
local entry = redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3])[1]
redis.call('XACK', KEYS[1], ARGV[1], ARGV[3])
redis.call('XDEL', KEYS[1], ARGV[3])
redis.call('XADD', KEYS[1], '*', unpack(entry[2]))
if ARGV[4] ~= '' then redis.call('XADD', KEYS[2], '*', 'state', ARGV[4], 'done', '0') end
return 1
"""

CANCEL = f"""
-- KEYS: job stream, log, cancel, in flight.
-- ARGV: group, build id, cancelled state, seconds kept, milliseconds of silence after which a worker is dead.
-- Ends a build that no worker runs; asks the worker that runs it to stop. Does nothing to an ended one.
{_END}
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if not last or last[2][4] == '1' then return 0 end
local found
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do
  if entry[2][2] == ARGV[2] then found = entry[1] end
end
if found then
  local pending = redis.pcall('XPENDING', KEYS[1], ARGV[1], found, found, 1)
  if not pending.err and pending[1] and pending[1][3] < tonumber(ARGV[5]) then
    redis.call('SET', KEYS[3], '1', 'EX', ARGV[4])
    -- Who asks for the same from now on wants a new build.
    if redis.call('GET', KEYS[4]) == ARGV[2] then redis.call('DEL', KEYS[4]) end
    return 1
  end
end
finish(found, ARGV[2], ARGV[3], ARGV[4])
return 1
"""

DELETE = """
-- KEYS: log, all builds. ARGV: build id.
-- Returns 1 if the build was ended and is forgotten, 0 if it still runs, -1 if there is none.
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not last then return -1 end
if last[2][4] ~= '1' then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""

CLAIM_KEY = """
-- KEYS: claim. ARGV: build id, milliseconds that it lasts. Returns 1 if the build has the claim now.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

RELEASE_KEY = """
-- KEYS: claim. ARGV: build id.
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""
