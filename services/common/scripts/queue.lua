-- Prelude of the pool's scripts. Keys of the slot:
--   q (counters)  tq (counters by tenant)  req:<id>  live (id -> gateway)  w:<class>:<tenant> (streams, group g)
--   act:<class> (tenant, virtual time) of tenants with fresh entries; vt:<class> of the others
--   age:<class> (fresh entries by admission)  lease (<class>|<tenant>|<entry>|<claim number>, expiry)
--   lost:<worker> (requests that it died with)  parked (stream of what POISONED ended)  usage, unsettled, bell
-- Re-admitted entries are in w:front:<tenant> with an expired lease, so they are served before fresh ones.
local Q, T, LEASE, LIVE = P .. 'q', P .. 'tq', P .. 'lease', P .. 'live'
local NAMES = {'state', 'stream', 'entry', 'claim', 'cls', 'tenant', 'cost', 'size', 'weight', 'charged', 'epoch',
  'claims', 'deadline', 'since', 'attempt', 'terminal', 'computed', 'billed', 'slots', 'counted'}
local FINISHED_TTL_MS = 1800000
local EXPIRED_STATE = 4
local MAX_PARKED = 1000

local function req(id) return P .. 'req:' .. id end

local function work(class, tenant) return P .. 'w:' .. class .. ':' .. tenant end

local function read(id)
  local values = call('HMGET', req(id), unpack(NAMES))
  if not values[1] then return nil end
  local r = {id = id}
  for i, name in ipairs(NAMES) do r[name] = values[i] end
  return r
end

-- Rung when something may be claimed that could not be before: routers claim from a queue found empty for no other cause.
local function ring() call('XADD', P .. 'bell', 'MAXLEN', 1, '*', 'b', '1') end

-- One fresh entry less; a tenant with none left takes its virtual time out of the active set.
local function unfresh(class, tenant, entry)
  call('ZREM', P .. 'age:' .. class, tenant .. '|' .. entry)
  local field = 'f|' .. class .. '|' .. tenant
  add(T, field, -1)
  if call('HEXISTS', T, field) == 0 then
    local vt = call('ZSCORE', P .. 'act:' .. class, tenant)
    if vt then call('HSET', P .. 'vt:' .. class, tenant, vt) end
    call('ZREM', P .. 'act:' .. class, tenant)
  end
end

local function drop(class, tenant, entry)
  local stream = work(class, tenant)
  call('XACK', stream, 'g', entry)
  call('XDEL', stream, entry)
  if call('XLEN', stream) == 0 then call('DEL', stream) end
end

-- Takes the request's entry out of the queue; false when it has none.
local function leave(r)
  if not r.entry then return false end
  drop(r.stream, r.tenant, r.entry)
  if r.claim then call('ZREM', LEASE, r.claim) end
  if r.state == 'queued' and r.stream ~= 'front' then unfresh(r.cls, r.tenant, r.entry) end
  add(Q, 'n', -1)
  add(Q, 'bytes', -tonumber(r.size))
  add(Q, 'tok|' .. r.cls, -tonumber(r.cost))
  add(T, 'n|' .. r.tenant, -1)
  add(T, 'tok|' .. r.cls .. '|' .. r.tenant, -tonumber(r.cost))
  call('HDEL', req(r.id), 'entry', 'claim')
  r.entry = false
  return true
end

-- Caps of a tenant in each worker. Only of tenants that have some is counted what workers hold: from the claim on.
local function cap(tenant, slots, tokens)
  if slots .. tokens ~= '' then
    call('HSET', T, 'caps|' .. tenant, slots .. '|' .. tokens)
  else
    call('HDEL', T, 'caps|' .. tenant)
  end
end

local function count(r)
  if r.counted or call('HEXISTS', T, 'caps|' .. r.tenant) == 0 then return end
  call('HINCRBY', T, 'slots|' .. r.tenant, r.slots)
  call('HINCRBY', T, 'tokens|' .. r.tenant, r.cost)
  call('HSET', req(r.id), 'counted', 1)
end

local function uncount(r)
  if not r.counted then return end
  add(T, 'slots|' .. r.tenant, -tonumber(r.slots))
  add(T, 'tokens|' .. r.tenant, -tonumber(r.cost))
  call('HDEL', req(r.id), 'counted')
  -- What waited for this tenant's caps may be claimed now.
  if call('HEXISTS', T, 'n|' .. r.tenant) == 1 then ring() end
end

-- One request is always let through.
local function is_capped(tenant, workers)
  local caps, slots, tokens = unpack(call('HMGET', T, 'caps|' .. tenant, 'slots|' .. tenant, 'tokens|' .. tenant))
  if not caps or not slots then return false end
  local most_slots, most_tokens = string.match(caps, '^(%d*)|(%d*)$')
  local function full(held, most) return most ~= '' and tonumber(held) >= tonumber(most) * workers end
  return full(slots, most_slots) or full(tokens, most_tokens)
end

-- What a claim charges: the cost, corrected by what was computed of the costs of requests that ended lately. Charged by
-- what is asked for, a tenant that comes would wait until those before it are given back what their answers never take.
local LATELY = 31 / 32
local function expected(class, cost)
  local used, asked = unpack(call('HMGET', Q, 'used|' .. class, 'asked|' .. class))
  return used and math.max(1, cost * tonumber(used) / tonumber(asked)) or cost
end

local function learn(class, cost, computed)
  local used, asked = unpack(call('HMGET', Q, 'used|' .. class, 'asked|' .. class))
  call('HSET', Q, 'used|' .. class, tonumber(used or '0') * LATELY + computed,
    'asked|' .. class, tonumber(asked or '0') * LATELY + cost)
end

local function true_up(r, computed)
  if tonumber(r.charged) > 0 then learn(r.cls, tonumber(r.cost), computed) end
  local delta = (computed - tonumber(r.charged)) / tonumber(r.weight)
  if delta == 0 then return end
  local act, vts = P .. 'act:' .. r.cls, P .. 'vt:' .. r.cls
  if call('ZSCORE', act, r.tenant) then
    call('ZINCRBY', act, delta, r.tenant)
  else
    local vt = tonumber(call('HGET', vts, r.tenant) or '0') + delta
    if vt <= tonumber(call('HGET', Q, 'last|' .. r.cls) or '0') then
      call('HDEL', vts, r.tenant)
    else
      call('HSET', vts, r.tenant, vt)
    end
  end
end

-- Compare-and-set of the terminal. r is nil when the request is unknown: then only the tombstone and the event.
local function finish(r, t)
  if r and r.state == 'finished' then
    return {0, tonumber(r.terminal), r.tenant, tonumber(r.computed), tonumber(r.billed)}
  end
  if r and t.epoch > 0 and t.epoch < tonumber(r.epoch) then return {0, 0, r.tenant, 0, 0} end
  if r then
    leave(r)
    uncount(r)
    true_up(r, t.computed)
  end
  local key = req(t.id)
  call('HDEL', key, 'event')
  call('HSET', key, 'state', 'finished', 'terminal', t.state, 'tenant', t.tenant, 'computed', t.computed,
    'billed', t.billed, 'reason', t.reason, 'epoch', math.max(t.epoch, r and tonumber(r.epoch) or 0))
  call('PEXPIRE', key, FINISHED_TTL_MS)
  call('HDEL', LIVE, t.id)
  if t.reason == 'POISONED' then
    local lost = call('HGET', key, 'lost') or ''
    call('XADD', P .. 'parked', 'MAXLEN', '~', MAX_PARKED, '*', 'r', t.id, 'w', lost, 'e', t.event)
  end
  call('XADD', P .. 'usage', '*', 'e', t.event)
  call('ZADD', P .. 'unsettled', now, t.id)
  return {1, t.state, t.tenant, t.computed, t.billed}
end

-- A first attempt ends here with the event its gateway wrote at admission. A later one may have delivered tokens:
-- it only leaves the queue, and its gateway (or the reaper) ends it.
local function expire(r)
  if tonumber(r.attempt) > 1 then return leave(r) end
  return finish(r, {id = r.id, tenant = r.tenant, epoch = 0, state = EXPIRED_STATE, computed = 0, billed = 0,
    reason = 'DEADLINE_EXCEEDED', event = call('HGET', req(r.id), 'event')})
end

-- Tokens that leave the queue per millisecond while it is not empty; nil before anything was measured.
local function drain_rate()
  local v = call('HMGET', Q, 'dtok', 'dms', 'busy_since', 'n')
  if not v[1] then return nil end
  local waited = v[4] and math.max(0, now - tonumber(v[3])) or 0
  return tonumber(v[1]) / math.max(1, tonumber(v[2]) + waited)
end

local function drained(cost)
  local v = call('HMGET', Q, 'dtok', 'dms', 'busy_since')
  local elapsed = math.max(0, now - tonumber(v[3] or now))
  local keep = math.exp(-elapsed / 10000)
  call('HSET', Q, 'dtok', tonumber(v[1] or '0') * keep + cost, 'dms', tonumber(v[2] or '0') * keep + elapsed,
    'busy_since', now)
end
