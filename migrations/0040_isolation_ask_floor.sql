-- What: the lowest isolation that the runs of a tenant may request with an approval.
-- Why:  a run below the tenant's floor may start if an operator permits to ask for it and a person allows it.
-- Lock: ACCESS EXCLUSIVE on tenants for a moment. Nothing is rewritten: the new column is null, which permits nothing.

ALTER TABLE tenants
    ADD COLUMN isolation_ask_floor text CHECK (isolation_ask_floor IN ('LEVEL_0', 'LEVEL_1', 'LEVEL_2'));
