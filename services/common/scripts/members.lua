-- KEYS: leases (zset by expiry), values (hash), pools (set). ARGV: now op name value ttl_ms pool. Leases of workers and
-- gateways: op renew | drop | list.
local op, name = ARGV[2], ARGV[3]
if op == 'renew' then
  call('ZADD', KEYS[1], now + tonumber(ARGV[5]), name)
  call('HSET', KEYS[2], name, ARGV[4])
  if ARGV[6] ~= '' then call('SADD', KEYS[3], ARGV[6]) end
  return {}
end
local gone = op == 'drop' and {name} or call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1000)
if #gone > 0 then
  call('ZREM', KEYS[1], unpack(gone))
  call('HDEL', KEYS[2], unpack(gone))
end
return op == 'list' and call('HGETALL', KEYS[2]) or {}
