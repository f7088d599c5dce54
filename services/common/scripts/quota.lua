-- Prelude of the tenant's scripts. Keys of the slot: live (id, expiry)  res (id -> reservation)  where:<id>, and of each
-- scope, which is the tenant ('') or one of its keys ('|<key id>'):
--   rpm (id, ms)  tin, tout (second -> tokens)
--   budget {reserved, nanos, live: held now; spent: ever; day_* and month_*: spent in that UTC day or month; known: 1 once
--   the ledger has said what was spent}
-- What is held counts against whatever day and month it is, and is spent in those in which it is settled: no edge of a
-- period lets anything through. Money is in nanos (10^-9) of the currency unit.
local LIVE, RES = P .. 'live', P .. 'res'
local HOLD_MS, WINDOW_S, DAY_MS = 30000, 60, 86400000
local LIMITS = {
  'requests_per_minute', 'tokens_per_minute', 'concurrent_requests', 'budget_tokens', 'input_tokens_per_minute',
  'output_tokens_per_minute', 'daily_budget_tokens', 'monthly_budget_tokens', 'daily_budget_nanos',
  'monthly_budget_nanos',
}
-- {limit, what is spent of it, what is held of it, its period}, the longest period first.
local BUDGETS = {
  {'budget_tokens', 'spent', 'reserved'},
  {'monthly_budget_tokens', 'month_tokens', 'reserved', 'month'},
  {'monthly_budget_nanos', 'month_nanos', 'nanos', 'month'},
  {'daily_budget_tokens', 'day_tokens', 'reserved', 'day'},
  {'daily_budget_nanos', 'day_nanos', 'nanos', 'day'},
}
local BOOK = {
  'reserved', 'nanos', 'live', 'spent', 'day', 'day_tokens', 'day_nanos', 'month', 'month_tokens', 'month_nanos', 'known',
}
local second = math.floor(now / 1000)

-- Months since the year 0 of a day since 1970-01-01 (H. Hinnant, chrono-compatible low-level date algorithms).
local function month_of(day)
  local era_day = (day + 719468) % 146097
  local era = (day + 719468 - era_day) / 146097
  local floor = math.floor
  local leap_days = floor(era_day / 1460) - floor(era_day / 36524) + floor(era_day / 146096)
  local year = floor((era_day - leap_days) / 365)
  local year_day = era_day - (365 * year + floor(year / 4) - floor(year / 100))
  return (era * 400 + year) * 12 + floor((5 * year_day + 2) / 153) + 2
end

local today = math.floor(now / DAY_MS)
local this_month = month_of(today)

local function scopes_of(key)
  if key == '' then return {''} end
  return {'', '|' .. key}
end

-- The limits of each scope, from ARGV[first] on; empty is none.
local function limits_at(first, scopes)
  local all = {}
  for n = 1, #scopes do
    all[n] = {}
    for i, name in ipairs(LIMITS) do all[n][name] = tonumber(ARGV[first - 1 + (n - 1) * #LIMITS + i] or '') end
  end
  return all
end

-- A reservation: second of its rate buckets (0: it has none), input and output reserved there, tokens leased of the
-- budget, nanos a token of input and of output, the key whose limits count too.
local function held(id)
  local value = call('HGET', RES, id)
  if not value then return nil end
  local n, key = {}, string.match(value, '|([^|]*)$')
  for number in string.gmatch(value, '(%d+)|') do n[#n + 1] = tonumber(number) end
  return {second = n[1], input = n[2], output = n[3], budget = n[4], price_in = n[5], price_out = n[6], key = key}
end

local function cost(r, tokens)
  return math.min(tokens, r.input) * r.price_in + math.max(0, tokens - r.input) * r.price_out
end

-- The most tokens that cost no more than `nanos`.
local function affordable(r, nanos)
  if nanos < r.input * r.price_in then return math.floor(nanos / r.price_in) end
  if r.price_out == 0 then return math.huge end
  return r.input + math.floor((nanos - r.input * r.price_in) / r.price_out)
end

-- Hold `budget` tokens under the id, in place of what it held before.
local function hold(id, r, budget)
  local tokens, nanos = budget - r.budget, cost(r, budget) - cost(r, r.budget)
  local fresh = call('HEXISTS', RES, id) == 0
  for _, scope in ipairs(scopes_of(r.key)) do
    if tokens > 0 then call('HINCRBY', P .. 'budget' .. scope, 'reserved', tokens) end
    if nanos > 0 then call('HINCRBY', P .. 'budget' .. scope, 'nanos', nanos) end
    if fresh and scope ~= '' then call('HINCRBY', P .. 'budget' .. scope, 'live', 1) end
  end
  r.budget = budget
  local value = {r.second, r.input, r.output, r.budget, r.price_in, r.price_out, r.key}
  call('HSET', RES, id, table.concat(value, '|'))
  call('ZADD', LIVE, now + HOLD_MS, id)
end

local function free(id, r)
  call('HDEL', RES, id)
  call('ZREM', LIVE, id)
  for _, scope in ipairs(scopes_of(r.key)) do
    local nanos = cost(r, r.budget)
    if r.budget > 0 then add(P .. 'budget' .. scope, 'reserved', -r.budget) end
    if nanos > 0 then add(P .. 'budget' .. scope, 'nanos', -nanos) end
    if scope ~= '' then add(P .. 'budget' .. scope, 'live', -1) end
  end
end

local function free_expired()
  for _, id in ipairs(call('ZRANGEBYSCORE', LIVE, '-inf', now, 'LIMIT', 0, 1000)) do
    local r = held(id)
    if r then free(id, r) else call('ZREM', LIVE, id) end
  end
end

-- The budget of a scope as it stands in the running day and month.
local function book(scope)
  local values, b = call('HMGET', P .. 'budget' .. scope, unpack(BOOK)), {}
  for i, name in ipairs(BOOK) do b[name] = tonumber(values[i] or '0') end
  if b.day < today then b.day, b.day_tokens, b.day_nanos = today, 0, 0 end
  if b.month < this_month then b.month, b.month_tokens, b.month_nanos = this_month, 0, 0 end
  return b
end

local function write_book(scope, b)
  local args = {}
  for i = 4, #BOOK do
    args[#args + 1] = BOOK[i]
    args[#args + 1] = b[BOOK[i]]
  end
  call('HSET', P .. 'budget' .. scope, unpack(args))
end
