-- ARGV: now, then id epoch worker for each. An older epoch, a finished or an unknown request changes nothing.
local owned = 0
for i = 2, #ARGV, 3 do
  local r, epoch = read(ARGV[i]), tonumber(ARGV[i + 1])
  if r and r.state ~= 'finished' and epoch >= tonumber(r.epoch) then
    local cost = tonumber(r.cost)
    if leave(r) then drained(cost) end
    call('HSET', req(r.id), 'state', 'owned', 'owner', ARGV[i + 2], 'epoch', epoch)
    owned = owned + 1
  end
end
return owned
