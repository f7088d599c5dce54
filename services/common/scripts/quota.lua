-- Prelude of the tenant's scripts. Keys of the slot: live (id, expiry)  res (id -> second|tokens|budget)
-- budget {reserved, spent}  rpm (id, ms)  tpm (second -> tokens)  where:<id>
local LIVE, RES, BUDGET, RPM, TPM = P .. 'live', P .. 'res', P .. 'budget', P .. 'rpm', P .. 'tpm'
local HOLD_MS, WINDOW_S = 30000, 60
local second = math.floor(now / 1000)

local function held(id)
  local value = call('HGET', RES, id)
  if not value then return nil end
  local s, tokens, budget = string.match(value, '^(%d+)|(%d+)|(%d+)$')
  return {second = tonumber(s), tokens = tonumber(tokens), budget = tonumber(budget)}
end

local function hold(id, r)
  call('HSET', RES, id, string.format('%d|%d|%d', r.second, r.tokens, r.budget))
  call('ZADD', LIVE, now + HOLD_MS, id)
end

local function free(id, r)
  call('HDEL', RES, id)
  call('ZREM', LIVE, id)
  if r.budget > 0 then add(BUDGET, 'reserved', -r.budget) end
end

local function used_budget()
  local v = call('HMGET', BUDGET, 'reserved', 'spent')
  return tonumber(v[1] or '0') + tonumber(v[2] or '0')
end

local function free_expired()
  for _, id in ipairs(call('ZRANGEBYSCORE', LIVE, '-inf', now, 'LIMIT', 0, 1000)) do
    free(id, held(id) or {budget = 0})
  end
end
