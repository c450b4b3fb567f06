"""The Lua scripts of `tenancy/store.py`, one per change. KEYS[1] is the tenant's hash, KEYS[2] the hash of its keys, one hash tag."""

from __future__ import annotations

CREATE = """
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'weight', ARGV[1], 'created_at', ARGV[2], 'salt_secret', ARGV[3], 'salt_epoch', 1)
return 1
"""

READ = "return redis.call('HMGET', KEYS[1], 'weight', 'created_at', 'salt_epoch')"

SET_WEIGHT = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'weight', ARGV[1])
return 1
"""

ROTATE_SALT = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'salt_secret', ARGV[1])
return redis.call('HINCRBY', KEYS[1], 'salt_epoch', 1)
"""

DELETE = "return redis.call('DEL', KEYS[1], KEYS[2])"

ADD_KEY = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
"""

LIST_KEYS = """
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
return redis.call('HGETALL', KEYS[2])
"""

DELETE_KEY = "return redis.call('HDEL', KEYS[2], ARGV[1])"

AUTHENTICATE = """
local tenant = redis.call('HMGET', KEYS[1], 'weight', 'salt_secret', 'salt_epoch')
return {tenant[1], tenant[2], tenant[3], redis.call('HGET', KEYS[2], ARGV[1])}
"""

ADD_TO_INDEX = "return redis.call('SADD', KEYS[1], ARGV[1])"
REMOVE_FROM_INDEX = "return redis.call('SREM', KEYS[1], ARGV[1])"
SET_ONCE = "return redis.call('SET', KEYS[1], ARGV[1], 'NX') and 1 or 0"
MEMBERS = "return redis.call('SMEMBERS', KEYS[1])"
GET = "return redis.call('GET', KEYS[1])"
SET = "redis.call('SET', KEYS[1], ARGV[1]) return 1"
