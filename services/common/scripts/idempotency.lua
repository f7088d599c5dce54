-- KEYS: the record (hash: token body owner state result). ARGV: now op token, then for claim: expected ttl_ms body
-- owner; for complete: ttl_ms result. Every op but claim acts only on the record of its token.
local record, op, token = KEYS[1], ARGV[2], ARGV[3]
local held = redis.call('HGET', record, 'token')
if op == 'claim' then
  -- Free, or still the one that was found to be of a dead owner; an answer stays.
  if held and held ~= token and (held ~= ARGV[4] or redis.call('HGET', record, 'state') == 'done') then return 0 end
  if held ~= token then
    redis.call('DEL', record)
    redis.call('HSET', record, 'token', token, 'body', ARGV[6], 'owner', ARGV[7], 'state', 'running')
    redis.call('PEXPIRE', record, ARGV[5])
  end
  return 1
end
if held ~= token then return 0 end
if redis.call('HGET', record, 'state') == 'done' then return op == 'complete' and 1 or 0 end
if op == 'complete' then
  redis.call('HSET', record, 'state', 'done', 'result', ARGV[5])
  redis.call('PEXPIRE', record, ARGV[4])
elseif op == 'release' then
  redis.call('DEL', record)
end
return 1
