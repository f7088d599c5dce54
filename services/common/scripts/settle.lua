-- ARGV: now id computed billed; computed empty = release, nothing was used. Returns 1, or 0 when nothing is held.
local id, computed = ARGV[2], tonumber(ARGV[3])
call('DEL', P .. 'where:' .. id)
local r = held(id)
if not r then return 0 end
free(id, r)
if not computed then call('ZREM', RPM, id) end
local delta = (computed or 0) - r.tokens
if delta ~= 0 and r.second >= second - WINDOW_S then
  add(TPM, r.second, delta)
  call('PEXPIRE', TPM, WINDOW_S * 2000)
end
local billed = tonumber(ARGV[4])
if billed > 0 then call('HINCRBY', BUDGET, 'spent', billed) end
return 1
