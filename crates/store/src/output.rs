//! The table `run_output`: the output of runs, in order.

use codelia_types::{LeaseToken, RunId, TenantId};

use crate::{Error, Store};

/// Maximum number of rows that one read examines.
const MAX_READ_ROWS: i64 = 64;

/// The stream that output was written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputStream {
    /// Standard output or the terminal.
    Stdout = 1,
    /// Standard error.
    Stderr = 2,
}

/// A piece of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputChunk {
    /// Offset of its first byte in the combined output of both streams.
    pub position: i64,
    /// The stream.
    pub stream: OutputStream,
    /// Offset of its first byte in its own stream.
    pub offset: i64,
    /// The bytes.
    pub data: Vec<u8>,
}

/// Chunks as arrays of columns, to insert them in one statement.
#[derive(Default)]
pub(crate) struct Columns<'a> {
    pub(crate) positions: Vec<i64>,
    pub(crate) streams: Vec<i16>,
    pub(crate) offsets: Vec<i64>,
    pub(crate) data: Vec<&'a [u8]>,
}

impl<'a> Columns<'a> {
    pub(crate) fn new(chunks: &'a [OutputChunk]) -> Self {
        Self {
            positions: chunks.iter().map(|chunk| chunk.position).collect(),
            streams: chunks.iter().map(|chunk| chunk.stream as i16).collect(),
            offsets: chunks.iter().map(|chunk| chunk.offset).collect(),
            data: chunks.iter().map(|chunk| chunk.data.as_slice()).collect(),
        }
    }
}

impl OutputChunk {
    /// Drops the bytes before `position`.
    fn starting_at(mut self, position: i64) -> Self {
        if let Ok(skip @ 1..) = usize::try_from(position - self.position) {
            self.data.drain(..skip.min(self.data.len()));
            self.offset += position - self.position;
            self.position = position;
        }
        self
    }
}

impl Store {
    /// Appends output to a run that is running under this lease. Repeating the call with the same
    /// chunks changes nothing.
    ///
    /// # Errors
    /// [`Error::Fenced`] if the run does not run under this lease or the lease expired.
    pub async fn output_append(
        &self,
        run: RunId,
        lease: &LeaseToken,
        chunks: &[OutputChunk],
    ) -> Result<(), Error> {
        let columns = Columns::new(chunks);
        let matched = sqlx::query_scalar!(
            // The row lock makes this statement wait for a transaction that takes the run away from
            // the worker. A worker repeats a flush whose answer was lost, with the same chunks.
            r#"WITH run AS (
                 SELECT r.id FROM live_runs r
                 JOIN sessions s ON s.id = r.session_id
                     -- Not by the index of holders, which has all sessions of the worker.
                     AND s.lease_worker || '' = $2 AND s.lease_incarnation = $3 AND s.lease_epoch = $4
                 JOIN workers w ON w.id = $2 AND w.incarnation = $3 AND w.lease_until > now()
                 WHERE r.id = $1 AND r.state = 'running'
                   AND r.worker_id = $2 AND r.incarnation = $3 AND r.lease_epoch = $4
                 FOR SHARE OF r
             ),
             stored AS (
                 INSERT INTO run_output (run_id, position, stream, stream_offset, data)
                 SELECT run.id, c.position, c.stream, c.stream_offset, c.data
                 FROM run, unnest($5::bigint[], $6::smallint[], $7::bigint[], $8::bytea[])
                     AS c (position, stream, stream_offset, data)
                 ON CONFLICT (run_id, position) DO NOTHING
             )
             SELECT count(*) AS "matched!" FROM run"#,
            run.0,
            lease.worker.as_str(),
            lease.incarnation.0,
            lease.epoch.0,
            &columns.positions,
            &columns.streams,
            &columns.offsets,
            &columns.data as _,
        )
        .fetch_one(&self.pools.runs)
        .await?;
        if matched == 0 {
            return Err(Error::Fenced);
        }
        Ok(())
    }

    /// Reads the output of a tenant's run from `position` on, in order. Returns chunks until they
    /// hold about `max_bytes`, and at least one if there is any. The first one starts at
    /// `position`.
    pub async fn output_read(
        &self,
        tenant: &TenantId,
        run: RunId,
        position: i64,
        max_bytes: i64,
    ) -> Result<Vec<OutputChunk>, Error> {
        let rows = sqlx::query!(
            r#"SELECT position, stream, stream_offset, data FROM (
                   SELECT o.position, o.stream, o.stream_offset, o.data,
                          sum(octet_length(o.data)) OVER (ORDER BY o.position) - octet_length(o.data) AS before
                   FROM run_output o
                   WHERE o.run_id = $2
                     AND (EXISTS (SELECT 1 FROM live_runs WHERE id = $2 AND tenant_id || '' = $1)
                          OR EXISTS (SELECT 1 FROM ended_runs WHERE id = $2 AND tenant_id || '' = $1))
                     -- No chunk is longer than 1 MiB, so this includes the chunk at the position.
                     AND o.position > $3::bigint - 1048576
                     AND o.position + octet_length(o.data) > $3
                   ORDER BY o.position LIMIT $5
               ) AS found
               WHERE before < $4
               ORDER BY position"#,
            tenant.as_str(),
            run.0,
            position,
            max_bytes as _,
            MAX_READ_ROWS,
        )
        .fetch_all(&self.pools.reads)
        .await?;
        rows.into_iter()
            .map(|row| {
                let stream = match row.stream {
                    1 => OutputStream::Stdout,
                    2 => OutputStream::Stderr,
                    other => {
                        return Err(Error::UnknownValue {
                            column: "run_output.stream",
                            value: other.to_string(),
                        });
                    }
                };
                let chunk =
                    OutputChunk { position: row.position, stream, offset: row.stream_offset, data: row.data };
                Ok(chunk.starting_at(position))
            })
            .collect()
    }
}
