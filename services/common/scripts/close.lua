-- ARGV: now, then id claim_id for each. A request that is still held by this claim leaves the queue without an end: its
-- gateway enqueues it again, and until then it stays live. Returns how many left.
local closed = 0
for i = 2, #ARGV, 2 do
  local r = read(ARGV[i])
  if r and r.state == 'claimed' and r.claim == ARGV[i + 1] then
    leave(r)
    uncount(r)
    call('HSET', req(r.id), 'state', 'closed')
    closed = closed + 1
  end
end
return closed
