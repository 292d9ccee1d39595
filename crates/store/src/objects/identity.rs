//! Which store has the objects of this database. Both know the same random id, so a process with
//! another directory, or with a bucket of another installation, does not start.

use bytes::Bytes;
use uuid::Uuid;

use super::{ObjectProblem, Objects, OutputOptions, object_error};
use crate::{Error, Store};

/// The object with the id.
const ID_OBJECT: &str = "codelia-store-id";
/// Bytes of an id as text.
const ID_LENGTH: u64 = 36;

impl Store {
    /// Uses this store for large output, after it has written, read and removed an object there.
    ///
    /// # Errors
    /// [`Error::OutputStore`] if the store does not work, or is not the one that has the output of
    /// this database.
    pub async fn with_output(mut self, options: &OutputOptions) -> Result<Self, Error> {
        let location = options.store.clone().unwrap_or_default();
        let refuse =
            |problem: String| Error::OutputStore { location: location.to_string(), problem };
        let Some(objects) =
            Objects::open(&location, options).map_err(|problem| refuse(problem.to_string()))?
        else {
            return match self.output_store().await?.1 {
                None => Ok(self),
                Some(used) => Err(refuse(format!(
                    "this database has output in {used} (set output.store to it)"
                ))),
            };
        };
        objects.probe().await.map_err(|error| refuse(format!("cannot be used: {error}")))?;
        self.output_store_claim(&objects).await.map_err(|error| match error {
            Error::Object { .. } => refuse(error.to_string()),
            error => error,
        })?;
        let (id, used) = self.output_store().await?;
        match objects.stored_id().await.map_err(|error| refuse(error.to_string()))? {
            Some(found) if found == id => {}
            Some(_) => {
                return Err(refuse(
                    "it belongs to another database (use an empty one, or another prefix)"
                        .to_owned(),
                ));
            }
            None => {
                let used = used.unwrap_or_default();
                return Err(refuse(format!(
                    "it is not the store that this database uses, first seen as {used} (its {ID_OBJECT} is missing): \
                     api and workers need the same one"
                )));
            }
        }
        self.objects = Some(objects.into());
        Ok(self)
    }

    /// The id of the store, and where it is if it was ever used.
    async fn output_store(&self) -> Result<(String, Option<String>), Error> {
        let row = sqlx::query!("SELECT id, location FROM output_store")
            .fetch_one(&self.pools.runs)
            .await?;
        Ok((row.id.to_string(), row.location))
    }

    /// Makes this the store of a database that has none. The row is locked meanwhile: of two
    /// processes with different stores one is refused.
    async fn output_store_claim(&self, objects: &Objects) -> Result<(), Error> {
        if self.output_store().await?.1.is_some() {
            return Ok(());
        }
        let found = objects.stored_id().await?;
        let mut tx = self.pools.runs.begin().await?;
        let claimed = sqlx::query_scalar!(
            "UPDATE output_store SET location = $1 WHERE location IS NULL RETURNING id",
            objects.location
        )
        .fetch_optional(&mut *tx)
        .await?;
        // A store that has the id of another database is refused later.
        if let (Some(id), None) = (claimed, &found) {
            objects.put(ID_OBJECT, Bytes::from(id.to_string())).await?;
        }
        match (claimed, found) {
            (Some(id), Some(found)) if found != id.to_string() => tx.rollback().await?,
            _ => tx.commit().await?,
        }
        Ok(())
    }
}

impl Objects {
    /// Checks that objects can be written, read and removed.
    async fn probe(&self) -> Result<(), Error> {
        let name = format!("codelia-probe-{}", Uuid::now_v7());
        let content = Bytes::from_static(b"probe");
        self.put(&name, content.clone()).await?;
        let found = self.read(&name, 0..5).await?;
        self.delete(std::slice::from_ref(&name)).await?;
        if found != content {
            return Err(object_error(
                &name,
                ObjectProblem::Failed("reads differ from writes".to_owned()),
            ));
        }
        Ok(())
    }

    /// The id that the store has, if any.
    async fn stored_id(&self) -> Result<Option<String>, Error> {
        match self.read(ID_OBJECT, 0..ID_LENGTH).await {
            Ok(id) => Ok(Some(String::from_utf8_lossy(&id).into_owned())),
            Err(Error::Object { problem: ObjectProblem::Missing, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
