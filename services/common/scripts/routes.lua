-- KEYS: table (hash), history (stream). ARGV: now expected revision document who why. Puts the document in the place of
-- revision `expected`, or of any older one when that is empty (what Redis lost is put back). Returns the revision that
-- stands now, and 1 where this call wrote it. History: one entry a revision, its id is `<revision>-0`.
local expected, revision = ARGV[2], tonumber(ARGV[3])
local stands = tonumber(call('HGET', KEYS[1], 'revision') or '0')
if (expected ~= '' and tonumber(expected) ~= stands) or revision <= stands then return {stands, 0} end
call('HSET', KEYS[1], 'revision', revision, 'document', ARGV[4])
call('XADD', KEYS[2], revision .. '-0', 'time', now, 'who', ARGV[5], 'why', ARGV[6], 'document', ARGV[4])
return {revision, 1}
