-- ARGV: now id key prompt output lease price_in price_out where, limits of the tenant, limits of the key (empty = none).
-- Returns {} or {reason, retry_after_ms, scope, limit}. Tokens/min count whole seconds, so a bucket counts until its last
-- millisecond is 60 s old. A budget whose spending is not known (Redis was lost) admits nothing until it is.
local WHERE_S = 86400
local id, key, lease = ARGV[2], ARGV[3], tonumber(ARGV[6])
local r = {
  second = second, input = tonumber(ARGV[4]), output = tonumber(ARGV[5]), budget = 0, price_in = tonumber(ARGV[7]),
  price_out = tonumber(ARGV[8]), key = key,
}
if call('HEXISTS', RES, id) == 1 then
  call('ZADD', LIVE, 'XX', now + HOLD_MS, id)
  return {}
end
free_expired()

-- Buckets of the running minute, older ones dropped: {{second, tokens}...}, sum.
local function minute(name)
  local buckets, sum, flat = {}, 0, call('HGETALL', name)
  for i = 1, #flat, 2 do
    local s, n = tonumber(flat[i]), tonumber(flat[i + 1])
    if s < second - WINDOW_S then
      call('HDEL', name, flat[i])
    else
      buckets[#buckets + 1] = {s, n}
      sum = sum + n
    end
  end
  return buckets, sum
end

-- Milliseconds until `over` tokens of the buckets are out of the window.
local function until_out(over, ...)
  local buckets = {}
  for _, part in ipairs({...}) do
    for _, b in ipairs(part) do buckets[#buckets + 1] = b end
  end
  table.sort(buckets, function(a, b) return a[1] < b[1] end)
  for _, b in ipairs(buckets) do
    over = over - b[2]
    if over <= 0 then return math.max(1, (b[1] + WINDOW_S + 1) * 1000 - now) end
  end
  return WINDOW_S * 1000
end

local function until_next(period)
  local days = 1
  while period == 'month' and month_of(today + days) == this_month do days = days + 1 end
  return period and (today + days) * DAY_MS - now or 0
end

local function over_rate(scope, l)
  local rpm = P .. 'rpm' .. scope
  call('ZREMRANGEBYSCORE', rpm, '-inf', now - WINDOW_S * 1000)
  if l.requests_per_minute and call('ZCARD', rpm) >= l.requests_per_minute then
    local oldest = call('ZRANGE', rpm, 0, 0, 'WITHSCORES')[2]
    local wait = math.max(1, (oldest and tonumber(oldest) or now) + WINDOW_S * 1000 - now)
    return {'REQUESTS_PER_MINUTE', wait, scope, 'requests_per_minute'}
  end
  local tin, sum_in = minute(P .. 'tin' .. scope)
  local tout, sum_out = minute(P .. 'tout' .. scope)
  local function over(limit, asked, ...)
    if l[limit] and asked > l[limit] then
      return {'TOKENS_PER_MINUTE', until_out(asked - l[limit], ...), scope, limit}
    end
  end
  return over('tokens_per_minute', sum_in + sum_out + r.input + r.output, tin, tout)
    or over('input_tokens_per_minute', sum_in + r.input, tin)
    or over('output_tokens_per_minute', sum_out + r.output, tout)
end

local function over_budget(scope, l)
  local b = book(scope)
  local live = scope == '' and call('ZCOUNT', LIVE, '(' .. now, '+inf') or b.live
  if l.concurrent_requests and live >= l.concurrent_requests then
    return {'CONCURRENT_REQUESTS', 1000, scope, 'concurrent_requests'}
  end
  for _, rule in ipairs(BUDGETS) do
    local limit, asked = l[rule[1]], rule[3] == 'nanos' and cost(r, lease) or lease
    if limit and b.known == 0 then return {'STORE_UNAVAILABLE', 1000, scope, rule[1]} end
    if limit and b[rule[2]] + b[rule[3]] + asked > limit then
      return {'BUDGET_EXHAUSTED', until_next(rule[4]), scope, rule[1]}
    end
  end
end

local scopes = scopes_of(key)
for n, l in ipairs(limits_at(10, scopes)) do
  local refusal = over_rate(scopes[n], l) or over_budget(scopes[n], l)
  if refusal then return refusal end
end

for _, scope in ipairs(scopes) do
  call('ZADD', P .. 'rpm' .. scope, now, id)
  call('PEXPIRE', P .. 'rpm' .. scope, WINDOW_S * 2000)
  for name, tokens in pairs({tin = r.input, tout = r.output}) do
    if tokens > 0 then
      call('HINCRBY', P .. name .. scope, second, tokens)
      call('PEXPIRE', P .. name .. scope, WINDOW_S * 2000)
    end
  end
end
hold(id, r, lease)
if ARGV[9] ~= '' then call('SET', P .. 'where:' .. id, ARGV[9], 'EX', WHERE_S) end
return {}
