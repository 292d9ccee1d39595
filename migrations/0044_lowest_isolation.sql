-- What: a function that returns the lowest isolation that a tenant permits.
-- Why:  a worker checks it before it starts a run that waited. Its role may not read tenants.
-- Lock: none.

-- The floor of the tenant, or what its runs may ask for if that is lower. Null if there is no such tenant.
CREATE FUNCTION lowest_isolation(tenant text) RETURNS text
LANGUAGE sql STABLE AS $$
    -- The words for levels sort by level.
    SELECT least(isolation_floor, isolation_ask_floor) FROM tenants WHERE id = tenant
$$;
