-- What: making the partitions of a day waits less for a lock.
-- Why:  it locks one table after another, and a read of output may lock them in another order. Postgres ends one of
--       both after a second; now the upkeep gives way before, and tries again.
-- Lock: none that blocks reads or writes.

ALTER FUNCTION create_run_partitions(date) SET lock_timeout = '300ms';
