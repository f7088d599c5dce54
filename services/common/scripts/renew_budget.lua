-- ARGV: now id tokens limit (empty = none). Returns the tokens granted. A reservation that expired comes back, so that a
-- stalled stream goes on. Called twice, it holds more, never less; settle frees all of it.
local id, limit = ARGV[2], tonumber(ARGV[4])
local granted = tonumber(ARGV[3])
free_expired()
if limit then granted = math.max(0, math.min(granted, limit - used_budget())) end
local r = held(id)
if r == nil and granted == 0 then return 0 end
r = r or {second = second, tokens = 0, budget = 0}
r.budget = r.budget + granted
if granted > 0 then call('HINCRBY', BUDGET, 'reserved', granted) end
hold(id, r)
return granted
