"""The registry's Lua scripts; `registry.py` describes the keys. KEYS[1] is the names' set, from whose tag the others are made."""

from __future__ import annotations

KEY = "{reg}:names"

_NAMED = """
local name = ARGV[1]
local meta = '{reg}:a:' .. name
local versions, contents = meta .. ':versions', meta .. ':contents'
local aliases, grants = meta .. ':aliases', meta .. ':grants'
local draining, wanted = meta .. ':draining', meta .. ':wanted'
"""

_STATES = """
local function count(key, number, change)
  local digest = redis.call('HGET', meta, 'digest:' .. number)
  if redis.call('HINCRBY', key, digest, change) <= 0 then
    redis.call('HDEL', key, digest)
  end
end
local function make_ready(number)
  if redis.call('SREM', draining, number) == 1 then
    count('{reg}:draining', number, -1)
  end
end
local function forget_wanted(number)
  redis.call('HDEL', wanted, 'preload:' .. number, 'pin:' .. number)
end
local function forget(number)
  make_ready(number)
  forget_wanted(number)
  count('{reg}:digests', number, -1)
  redis.call('HDEL', meta, 'digest:' .. number, 'base:' .. number)
end
"""

REGISTER = (
    _NAMED
    + _STATES
    + """
local digest, base, content, record, default_alias = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
for i = 7, #ARGV do
  redis.call('SADD', grants, ARGV[i])
end
local existing = redis.call('HGET', contents, content)
if existing then
  make_ready(existing)
  return {existing, 0, redis.call('HGET', versions, existing)}
end
local number = redis.call('HINCRBY', meta, 'next', 1)
local first = redis.call('HLEN', versions) == 0
redis.call('SADD', KEYS[1], name)
redis.call('HSET', versions, number, record)
redis.call('HSET', contents, content, number)
redis.call('HSET', meta, 'digest:' .. number, digest, 'base:' .. number, base)
count('{reg}:digests', number, 1)
if first then
  redis.call('HSET', aliases, default_alias, number)
end
return {number, 1, record}
"""
)

RESOLVE = (
    _NAMED
    + """
local tenant, alias, number = ARGV[2], ARGV[3], ARGV[4]
if redis.call('SISMEMBER', grants, '*') == 0 and redis.call('SISMEMBER', grants, tenant) == 0 then
  return false
end
if alias ~= '' then
  number = redis.call('HGET', aliases, alias)
end
local record = number and redis.call('HGET', versions, number)
if not record then
  return false
end
return {number, record, redis.call('SISMEMBER', draining, number)}
"""
)

VISIBLE = """
local tenant, base, default_alias = ARGV[1], ARGV[2], ARGV[3]
local function is_of_base(meta)
  local number = redis.call('HGET', meta .. ':aliases', default_alias)
  return number and redis.call('HGET', meta, 'base:' .. number) == base
end
local found = {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local meta = '{reg}:a:' .. name
  local grants = meta .. ':grants'
  if redis.call('SISMEMBER', grants, '*') == 1 or redis.call('SISMEMBER', grants, tenant) == 1 then
    if base == '' or is_of_base(meta) then
      found[#found + 1] = name
    end
  end
end
return found
"""

NAMES = "return redis.call('SMEMBERS', KEYS[1])"

DIGESTS = """
local named, served = {}, {}
local counts = redis.call('HGETALL', '{reg}:digests')
for i = 1, #counts, 2 do
  local digest, num_versions = counts[i], tonumber(counts[i + 1])
  named[#named + 1] = digest
  if num_versions > tonumber(redis.call('HGET', '{reg}:draining', digest) or 0) then
    served[#served + 1] = digest
  end
end
return {named, served}
"""

RECORD = (
    _NAMED
    + """
local listed = {redis.call('HGETALL', versions), redis.call('HGETALL', aliases), redis.call('SMEMBERS', grants)}
listed[4] = redis.call('SMEMBERS', draining)
return listed
"""
)

DRAIN = (
    _NAMED
    + _STATES
    + """
local number = ARGV[2]
local record = redis.call('HGET', versions, number)
if record and redis.call('SADD', draining, number) == 1 then
  count('{reg}:draining', number, 1)
  forget_wanted(number)
end
return record
"""
)

WANT = (
    _NAMED
    + """
local number, kind, tier = ARGV[2], ARGV[3], ARGV[4]
if redis.call('HEXISTS', versions, number) == 0 then
  return 'missing'
end
if redis.call('SISMEMBER', draining, number) == 1 then
  return 'draining'
end
redis.call('HSET', wanted, kind .. ':' .. number, tier)
return 'ready'
"""
)

UNPIN = (
    _NAMED
    + """
redis.call('HDEL', wanted, 'pin:' .. ARGV[2])
return redis.call('HEXISTS', versions, ARGV[2])
"""
)

WANTED = """
local base, found = ARGV[1], {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local meta = '{reg}:a:' .. name
  local flat = redis.call('HGETALL', meta .. ':wanted')
  for i = 1, #flat, 2 do
    local kind, number = string.match(flat[i], '^(%a+):(%d+)$')
    if redis.call('HGET', meta, 'base:' .. number) == base then
      found[#found + 1] = {redis.call('HGET', meta, 'digest:' .. number), kind, flat[i + 1]}
    end
  end
end
return found
"""

SET_ALIAS = (
    _NAMED
    + """
if redis.call('HEXISTS', versions, ARGV[3]) == 0 then
  return 0
end
redis.call('HSET', aliases, ARGV[2], ARGV[3])
return 1
"""
)

SET_GRANTS = (
    _NAMED
    + """
if redis.call('SISMEMBER', KEYS[1], name) == 0 then
  return 0
end
redis.call('DEL', grants)
for i = 2, #ARGV do
  redis.call('SADD', grants, ARGV[i])
end
return 1
"""
)

REVOKE = """
for _, name in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  redis.call('SREM', '{reg}:a:' .. name .. ':grants', ARGV[1])
end
return 1
"""

DELETE_VERSION = (
    _NAMED
    + _STATES
    + """
local number = ARGV[2]
if redis.call('HEXISTS', versions, number) == 0 then
  return {0, ''}
end
local flat = redis.call('HGETALL', aliases)
for i = 1, #flat, 2 do
  if flat[i + 1] == number then
    return {1, flat[i]}
  end
end
local by_content = redis.call('HGETALL', contents)
for i = 1, #by_content, 2 do
  if by_content[i + 1] == number then
    redis.call('HDEL', contents, by_content[i])
  end
end
redis.call('HDEL', versions, number)
forget(number)
return {1, ''}
"""
)

DELETE_ADAPTER = (
    _NAMED
    + _STATES
    + """
if redis.call('SREM', KEYS[1], name) == 0 then
  return 0
end
for _, number in ipairs(redis.call('HKEYS', versions)) do
  forget(number)
end
redis.call('DEL', versions, contents, aliases, grants)
return 1
"""
)
