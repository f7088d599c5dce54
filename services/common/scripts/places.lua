-- The virtual queue: refused callers are told to come back one after the other, as the queue drains. Keys of the slot:
--   places (<number>|<cost>|<what was asked>, when to come back), places:<what was asked> (the same members of one ask)
--   placed (tenant, when its last caller comes back)
-- Who comes back is known by what it asks for. A place holds room against all that come for the first time, from AHEAD_MS
-- before its time (slots that end together make room for who comes one by one) to GRACE_MS after it, but never more than
-- half of a cap: callers that stay away starve nobody.
local PLACES, PLACED = P .. 'places', P .. 'placed'
local GRACE_MS, AHEAD_MS, MAX_WAIT_MS, MAX_PLACES = 3000, 1000, 60000, 16384
-- So much slower than the drain do places come due: a drain that slows a little still keeps what was promised.
local SLOWER = 1.25

local function forget_place(member)
  call('ZREM', PLACES, member)
  call('HINCRBY', Q, 'promised', -tonumber(string.match(member, '^%d+|(%d+)')))
  if call('EXISTS', PLACES) == 0 then call('HDEL', Q, 'promised') end
end

-- Whether this ask has a place whose time has come; it is given up.
local function take_place(ask)
  for _, member in ipairs(call('ZRANGEBYSCORE', PLACES, '-inf', now - GRACE_MS, 'LIMIT', 0, 64)) do
    forget_place(member)
  end
  call('ZREMRANGEBYSCORE', P .. 'places:' .. ask, '-inf', now - GRACE_MS)
  local first = call('ZRANGEBYSCORE', P .. 'places:' .. ask, '-inf', now, 'LIMIT', 0, 1)[1]
  if not first then return false end
  call('ZREM', P .. 'places:' .. ask, first)
  forget_place(first)
  return true
end

-- Requests and tokens that room is held for.
local function held_room()
  local due = call('ZCOUNT', PLACES, '-inf', now + AHEAD_MS)
  if due == 0 then return 0, 0 end
  return due, due / call('ZCARD', PLACES) * tonumber(call('HGET', Q, 'promised') or '0')
end

-- Milliseconds after which the caller should come back: behind its tenant's others, each `apart` ms (and some) after
-- the one before, and not before `least`. Without a rate nothing can be promised.
local function give_place(ask, tenant, cost, apart, least)
  local last = tonumber(call('ZSCORE', PLACED, tenant) or '0')
  local due = math.ceil(math.max(now + math.max(1000, least), last + apart * SLOWER))
  if due > now + MAX_WAIT_MS or call('ZCARD', PLACES) >= MAX_PLACES then return MAX_WAIT_MS end
  if call('EXISTS', PLACES) == 0 then call('HDEL', Q, 'promised') end
  local member = string.format('%d|%d|', call('HINCRBY', Q, 'seq', 1), cost) .. ask
  call('ZADD', PLACES, due, member)
  call('ZADD', P .. 'places:' .. ask, due, member)
  call('ZREMRANGEBYSCORE', PLACED, '-inf', now)
  call('ZADD', PLACED, due, tenant)
  call('HINCRBY', Q, 'promised', cost)
  for _, key in ipairs({PLACES, P .. 'places:' .. ask, PLACED}) do call('PEXPIRE', key, MAX_WAIT_MS + GRACE_MS) end
  return due - now
end
