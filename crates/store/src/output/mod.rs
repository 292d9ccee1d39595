//! The table `run_output`: the output of runs, in order.

mod chunk;
mod usage;

use bytes::Bytes;
use codelia_types::{LeaseToken, RunId, TenantId};
use serde::Serialize;
use sqlx::types::Json;

pub use self::chunk::{OutputChunk, OutputStream};
use crate::{Error, ObjectProblem, Store, objects::ObjectName};

/// Maximum number of rows that one read examines.
const MAX_READ_ROWS: i64 = 64;
/// Maximum bytes of a chunk; `run_output` refuses more.
const MAX_CHUNK: i64 = 1024 * 1024;

/// Maximum bytes of an object that one read takes.
const MAX_OBJECT_READ: u64 = 8 * 1024 * 1024;
/// Output of one flush that no object can hold.
const TOO_LARGE: Error = Error::UnknownValue { column: "run_output.length", value: String::new() };

/// Chunks as arguments of a statement that inserts them. Their bytes are in the rows, or all in one
/// object.
#[derive(Debug, Default)]
pub(crate) struct Columns<'a> {
    pub(crate) chunks: Vec<ChunkColumns>,
    pub(crate) data: Vec<Option<&'a [u8]>>,
    pub(crate) object: Option<String>,
}

/// The columns of a chunk next to its bytes.
#[derive(Debug, Serialize)]
pub(crate) struct ChunkColumns {
    position: i64,
    stream: i16,
    stream_offset: i64,
    object_offset: Option<i32>,
    length: Option<i32>,
}

impl<'a> Columns<'a> {
    fn inline(chunks: &'a [OutputChunk]) -> Self {
        let columns = |chunk: &OutputChunk| ChunkColumns {
            position: chunk.position,
            stream: chunk.stream as i16,
            stream_offset: chunk.offset,
            object_offset: None,
            length: None,
        };
        Self {
            chunks: chunks.iter().map(columns).collect(),
            data: chunks.iter().map(|chunk| Some(chunk.data.as_slice())).collect(),
            object: None,
        }
    }

    /// Moves the bytes of all chunks to an object.
    fn in_object(mut self, name: &ObjectName) -> Result<(Self, Bytes), Error> {
        let parts: Vec<&[u8]> = self.data.iter_mut().filter_map(Option::take).collect();
        let mut end = 0;
        for (part, chunk) in parts.iter().zip(&mut self.chunks) {
            let size = i32::try_from(part.len()).ok();
            chunk.object_offset = Some(end);
            chunk.length = size;
            end = size.and_then(|size| end.checked_add(size)).ok_or(TOO_LARGE)?;
        }
        self.object = Some(name.to_string());
        Ok((self, parts.concat().into()))
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
        let columns = self.output_columns(run, lease, chunks).await?;
        let matched = sqlx::query_file_scalar!(
            "src/sql/output_append.sql",
            run.0,
            lease.worker.as_str(),
            lease.incarnation.0,
            lease.epoch.0,
            Json(&columns.chunks) as _,
            &columns.data as _,
            columns.object.as_deref() as _,
        )
        .fetch_one(&self.pools.runs)
        .await?;
        if matched == 0 {
            return Err(Error::Fenced);
        }
        Ok(())
    }

    /// Prepares chunks for a statement that stores them if the lease is live. The bytes of many go
    /// to an object before it; if the lease is lost, no row ever names that object.
    pub(crate) async fn output_columns<'a>(
        &self,
        run: RunId,
        lease: &LeaseToken,
        chunks: &'a [OutputChunk],
    ) -> Result<Columns<'a>, Error> {
        let columns = Columns::inline(chunks);
        let bytes = chunks.iter().map(|chunk| chunk.data.len()).sum();
        let (Some(first), Some(objects)) = (chunks.first(), self.objects.as_ref()) else {
            return Ok(columns);
        };
        if !objects.takes(bytes) {
            return Ok(columns);
        }
        let name = ObjectName {
            run,
            incarnation: lease.incarnation,
            position: first.position,
            length: i64::try_from(bytes).map_err(|_| TOO_LARGE)?,
        };
        let (columns, data) = columns.in_object(&name)?;
        objects.put(&name.to_string(), data).await?;
        Ok(columns)
    }

    /// Reads the output of a tenant's run from `position` on, in order. Returns chunks until they
    /// hold about `max_bytes`, and at least one if there is any. The first one starts at
    /// `position`.
    ///
    /// # Errors
    /// [`Error::Object`] if an object that a row names does not have its bytes.
    pub async fn output_read(
        &self,
        tenant: &TenantId,
        run: RunId,
        position: i64,
        max_bytes: i64,
    ) -> Result<Vec<OutputChunk>, Error> {
        let rows = self.output_rows(tenant, run, position, max_bytes).await?;
        match self.output_load(run, position, rows).await {
            // Perhaps it was removed with its row since.
            Err(error @ Error::Object { problem: ObjectProblem::Missing, .. }) => {
                let rows = self.output_rows(tenant, run, position, 1).await?;
                if rows.is_empty() { Ok(Vec::new()) } else { Err(error) }
            }
            loaded => loaded,
        }
    }

    async fn output_rows(
        &self,
        tenant: &TenantId,
        run: RunId,
        position: i64,
        max_bytes: i64,
    ) -> Result<Vec<OutputRow>, Error> {
        let rows = sqlx::query_file_as!(
            OutputRow,
            "src/sql/output_read.sql",
            tenant.as_str(),
            run.0,
            position,
            max_bytes as _,
            MAX_READ_ROWS,
            MAX_CHUNK,
        )
        .fetch_all(&self.pools.reads)
        .await?;
        Ok(rows)
    }

    /// Reads what rows name, each object once.
    async fn output_load(
        &self,
        run: RunId,
        position: i64,
        mut rows: Vec<OutputRow>,
    ) -> Result<Vec<OutputChunk>, Error> {
        let mut chunks = Vec::with_capacity(rows.len());
        for group in rows.chunk_by_mut(|a, b| a.object.is_some() && a.object == b.object) {
            let (skip, bytes) = match group.first().and_then(|row| row.object.clone()) {
                Some(name) => self.output_object(run, position, &name, group).await?,
                None => (0, Bytes::new()),
            };
            for row in group {
                chunks.push(row.chunk(position, skip, &bytes)?);
            }
        }
        Ok(chunks)
    }

    /// Reads the part of an object that these rows need from `position` on, and returns where it
    /// starts.
    async fn output_object(
        &self,
        run: RunId,
        position: i64,
        name: &str,
        rows: &[OutputRow],
    ) -> Result<(i64, Bytes), Error> {
        let missing = |problem| Error::Object { name: name.to_owned(), problem };
        // A row may name only objects of its own run.
        if name.parse::<ObjectName>().map_or(true, |parsed| parsed.run != run) {
            return Err(Error::UnknownValue {
                column: "run_output.object",
                value: name.to_owned(),
            });
        }
        let objects = self.objects.as_ref().ok_or_else(|| missing(ObjectProblem::NotConfigured))?;
        let start = rows.iter().map(|row| row.object_start(position)).min().unwrap_or(0);
        let end = rows.iter().map(OutputRow::object_end).max().unwrap_or(0);
        let range = u64::try_from(start).ok().zip(u64::try_from(end).ok());
        let range = range.filter(|(start, end)| start < end && end - start <= MAX_OBJECT_READ);
        let (from, to) = range.ok_or_else(|| Error::UnknownValue {
            column: "run_output.object_offset",
            value: format!("{start}..{end}"),
        })?;
        Ok((start, objects.read(name, from..to).await?))
    }
}

/// A row of `run_output`.
struct OutputRow {
    position: i64,
    stream: i16,
    stream_offset: i64,
    data: Option<Vec<u8>>,
    object: Option<String>,
    object_offset: Option<i32>,
    length: Option<i32>,
}

impl OutputRow {
    /// Where the bytes from `position` on start in the object.
    fn object_start(&self, position: i64) -> i64 {
        self.object_offset.map_or(0, i64::from) + (position - self.position).max(0)
    }

    fn object_end(&self) -> i64 {
        self.object_offset.map_or(0, i64::from) + self.length.map_or(0, i64::from)
    }

    /// The chunk from `position` on, with its own bytes or those of an object from `skip` on.
    fn chunk(&mut self, position: i64, skip: i64, object: &Bytes) -> Result<OutputChunk, Error> {
        let unknown = |column, value: String| Error::UnknownValue { column, value };
        let stream = match self.stream {
            1 => OutputStream::Stdout,
            2 => OutputStream::Stderr,
            other => return Err(unknown("run_output.stream", other.to_string())),
        };
        let mut chunk = OutputChunk {
            position: self.position,
            stream,
            offset: self.stream_offset,
            data: Vec::new(),
        };
        let Some(data) = self.data.take() else {
            let start = self.object_start(position);
            let end = self.object_end();
            let range = usize::try_from(start - skip).ok().zip(usize::try_from(end - skip).ok());
            let part = range.and_then(|(start, end)| object.get(start..end));
            let part =
                part.ok_or_else(|| unknown("run_output.object_offset", start.to_string()))?;
            chunk = chunk.starting_at(position);
            chunk.data = part.to_vec();
            return Ok(chunk);
        };
        chunk.data = data;
        Ok(chunk.starting_at(position))
    }
}
