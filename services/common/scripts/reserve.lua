-- ARGV: now id tokens budget, limits (empty = none): requests/min tokens/min concurrent budget. Returns {} or
-- {reason, retry_after_ms}. Tokens/min count whole seconds, so a bucket counts until its last millisecond is 60 s old.
local id, tokens, budget = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local max_requests, max_tokens = tonumber(ARGV[5]), tonumber(ARGV[6])
local max_live, max_budget = tonumber(ARGV[7]), tonumber(ARGV[8])
if call('HEXISTS', RES, id) == 1 then
  call('ZADD', LIVE, 'XX', now + HOLD_MS, id)
  return {}
end
free_expired()

call('ZREMRANGEBYSCORE', RPM, '-inf', now - WINDOW_S * 1000)
if max_requests and call('ZCARD', RPM) >= max_requests then
  local oldest = call('ZRANGE', RPM, 0, 0, 'WITHSCORES')[2]
  return {'REQUESTS_PER_MINUTE', math.max(1, (oldest and tonumber(oldest) or now) + WINDOW_S * 1000 - now)}
end

local buckets, sum = {}, 0
local flat = call('HGETALL', TPM)
for i = 1, #flat, 2 do
  local s, n = tonumber(flat[i]), tonumber(flat[i + 1])
  if s < second - WINDOW_S then
    call('HDEL', TPM, flat[i])
  else
    buckets[#buckets + 1] = {s, n}
    sum = sum + n
  end
end
if max_tokens and sum + tokens > max_tokens then
  table.sort(buckets, function(a, b) return a[1] < b[1] end)
  local wait, over = WINDOW_S * 1000, sum + tokens - max_tokens
  for _, b in ipairs(buckets) do
    over = over - b[2]
    if over <= 0 then
      wait = (b[1] + WINDOW_S + 1) * 1000 - now
      break
    end
  end
  return {'TOKENS_PER_MINUTE', math.max(1, wait)}
end
if max_live and call('ZCOUNT', LIVE, '(' .. now, '+inf') >= max_live then return {'CONCURRENT_REQUESTS', 1000} end
if max_budget and used_budget() + budget > max_budget then return {'BUDGET_EXHAUSTED', 0} end

call('ZADD', RPM, now, id)
call('PEXPIRE', RPM, WINDOW_S * 2000)
if tokens > 0 then
  call('HINCRBY', TPM, second, tokens)
  call('PEXPIRE', TPM, WINDOW_S * 2000)
end
if budget > 0 then call('HINCRBY', BUDGET, 'reserved', budget) end
hold(id, {second = second, tokens = tokens, budget = budget})
return {}
