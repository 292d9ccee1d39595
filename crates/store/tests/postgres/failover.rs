//! After the database became another one, by a promotion or from a backup, no lease of the earlier
//! one is renewed, and no session is leased before all of them have ended.

use codelia_store::Error;

use crate::harness::{Fixture, LONG};

/// As if all rows came from another server.
const MOVE: &str = "UPDATE database_identity SET identity = 'earlier';
                    ALTER TABLE workers DISABLE TRIGGER check_identity;
                    UPDATE workers SET database_identity = 'earlier';
                    ALTER TABLE workers ENABLE TRIGGER check_identity;";
const END_FENCE: &str = "UPDATE database_identity SET fenced_until = now()";

#[tokio::test]
async fn renewal_fails_after_the_database_moved() {
    let fixture = Fixture::new().await;
    let worker = fixture.worker("w").await;
    fixture.store.worker_renew(&worker.id, worker.incarnation, LONG, 0).await.unwrap();
    fixture.database.execute(MOVE).await.unwrap();
    // Also the second time: the answer to the first may have been lost.
    for _ in 0..2 {
        let renewed = fixture.store.worker_renew(&worker.id, worker.incarnation, LONG, 0).await;
        assert!(matches!(renewed, Err(Error::Fenced)), "{renewed:?}");
    }
    let again = fixture.worker("w").await;
    fixture.store.worker_renew(&again.id, again.incarnation, LONG, 0).await.unwrap();
    fixture.end().await;
}

#[tokio::test]
async fn sessions_wait_until_lost_leases_have_ended() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let old = fixture.worker("old").await;
    let lost = fixture.lease(&session, &old).await.unwrap();
    fixture.expire_worker(&old).await;
    fixture.database.execute(MOVE).await.unwrap();
    let new = fixture.worker("new").await;
    assert!(fixture.lease(&session, &new).await.is_none(), "a lost lease may still last");
    fixture.database.execute(END_FENCE).await.unwrap();
    let next = fixture.lease(&session, &new).await.unwrap();
    assert!(next.token.epoch.0 > lost.token.epoch.0 + 1_000_000, "{next:?}");
    fixture.end().await;
}
