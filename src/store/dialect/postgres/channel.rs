//! The way to the other replicas: `LISTEN` and `NOTIFY`.
//!
//! Never inside a transaction that changes anything: commits with a `NOTIFY` in them go one by one, on the whole server.

use std::{io, time::Duration};

use async_trait::async_trait;
use sqlx::{
    PgPool, Row as _,
    postgres::{PgListener, PgNotification, PgPoolOptions},
};
use uuid::Uuid;

use super::{ACQUIRE_TIMEOUT, BEGIN_WRITE};
use crate::{
    buffer::{
        ids::PolicyName,
        replicas::{Awaited, Heard, WakeUp},
    },
    store::{Peers, StoreError},
};

/// The channel; every database has its own of this name.
const CHANNEL: &str = "forebay";

/// Pause before listening again.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

/// Pause before trying to listen again where a pooler is in between: that seldom changes while the service runs.
const ASK_POOLER_AGAIN: Duration = Duration::from_mins(1);

/// A setting that a session of the server has only if it was begun by this connection: a pooler refuses or drops it.
const MARK: &str = "forebay.listener";
const READ_MARK: &str = "SELECT current_setting('forebay.listener', true)";

/// SQLSTATE with which `PgBouncer` refuses a startup parameter that it does not know.
const PROTOCOL_VIOLATION: &str = "08P01";

/// Silence after which the connection is tried: networks forget connections that say nothing, and tell neither end.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Time that an echo has to come back.
const ECHO_TIMEOUT: Duration = Duration::from_secs(5);

/// What is told to find out whether anything is heard; it wakes nobody.
const ECHO: &str = "echo";

/// Tells through any connection, and listens on one of its own.
pub(super) struct Channel {
    pool: PgPool,
}

impl Channel {
    pub(super) fn new(pool: PgPool) -> Self {
        Self { pool }
    }

    /// Listens, and again whenever that fails.
    async fn keep_listening(&self, heard: &(dyn Fn(Heard) + Send + Sync)) {
        let mut fails = false;
        loop {
            let (error, pause) = match self.subscribe().await {
                Ok(Some(listener)) => {
                    if fails {
                        tracing::info!("other replicas are heard again");
                    }
                    fails = false;
                    // What was told while nobody listened is lost.
                    heard(Heard::Gap);
                    (self.hear(listener, heard).await.to_string(), LISTEN_AGAIN)
                }
                Ok(None) => ("a pooler such as PgBouncer is in between".to_owned(), ASK_POOLER_AGAIN),
                Err(error) => (error.to_string(), LISTEN_AGAIN),
            };
            if !fails {
                tracing::warn!(error, "other replicas are not heard: waiters find by looking what happens there");
            }
            fails = true;
            tokio::time::sleep(pause).await;
        }
    }

    /// Listens on a connection of its own; not where that is a pooler's.
    ///
    /// A pooler that gives each transaction another connection to the server takes a `LISTEN` without a word. It then
    /// sends what is notified to whoever has that connection at the time, in the middle of other answers.
    async fn subscribe(&self) -> Result<Option<PgListener>, sqlx::Error> {
        let mark = Uuid::new_v4().to_string();
        let options = self.pool.connect_options().as_ref().clone().options([(MARK, &mark)]);
        // A pool for each connection: in one for all, a connection that does not even end would keep the place.
        let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(ACQUIRE_TIMEOUT);
        let pool = match pool.connect_with(options).await {
            Err(error) if is_refused_parameter(&error) => return Ok(None),
            connected => connected?,
        };
        let mut listener = PgListener::connect_with(&pool).await?;
        let row = sqlx::raw_sql(READ_MARK).fetch_one(&mut listener).await?;
        if row.try_get::<Option<String>, _>(0)? != Some(mark) {
            return Ok(None);
        }
        listener.eager_reconnect(false);
        listener.listen(CHANNEL).await?;
        self.echo(&mut listener).await?;
        Ok(Some(listener))
    }

    /// Hands over what is told until the connection is lost; how that showed.
    async fn hear(&self, mut listener: PgListener, heard: &(dyn Fn(Heard) + Send + Sync)) -> sqlx::Error {
        loop {
            match self.next(&mut listener).await {
                // Anybody may notify: what cannot be read is for somebody else, or for a later version.
                Ok(told) => parse(told.payload()).into_iter().for_each(|wake_up| heard(Heard::WakeUp(wake_up))),
                Err(error) => return error,
            }
        }
    }

    async fn next(&self, listener: &mut PgListener) -> Result<PgNotification, sqlx::Error> {
        match tokio::time::timeout(SILENCE_MAX, listener.try_recv()).await {
            Ok(told) => unless_lost(told),
            Err(_) => self.echo(listener).await,
        }
    }

    /// Tells something, and hears that or what was told before it.
    async fn echo(&self, listener: &mut PgListener) -> Result<PgNotification, sqlx::Error> {
        self.notify(vec![ECHO.to_owned()]).await?;
        match tokio::time::timeout(ECHO_TIMEOUT, listener.try_recv()).await {
            Ok(told) => unless_lost(told),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "no notification comes through").into()),
        }
    }

    async fn notify(&self, payloads: Vec<String>) -> Result<(), sqlx::Error> {
        let pool = self.pool.clone();
        // A caller that is dropped in the middle would leave a connection in an unknown state.
        let task = tokio::spawn(async move {
            let mut transaction = pool.begin_with(BEGIN_WRITE).await?;
            sqlx::query("SELECT pg_notify($1, payload) FROM unnest($2::TEXT[]) AS payload")
                .persistent(false)
                .bind(CHANNEL)
                .bind(payloads)
                .execute(&mut *transaction)
                .await?;
            transaction.commit().await
        });
        task.await.map_err(|_| sqlx::Error::WorkerCrashed)??;
        Ok(())
    }
}

fn is_refused_parameter(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.code().as_deref() == Some(PROTOCOL_VIOLATION))
}

/// A listener says with nothing that its connection is gone.
fn unless_lost(told: Result<Option<PgNotification>, sqlx::Error>) -> Result<PgNotification, sqlx::Error> {
    told?.ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionAborted).into())
}

/// `REPLICA AWAITED POLICY`: at most 173 bytes, of the 7,999 that a notification may have.
fn payload(wake_up: &WakeUp) -> String {
    let awaited = match wake_up.awaited {
        Awaited::Batch => "batch",
        Awaited::Version => "version",
    };
    format!("{} {awaited} {}", wake_up.replica, wake_up.policy)
}

fn parse(payload: &str) -> Option<WakeUp> {
    let mut words = payload.splitn(3, ' ');
    let replica = words.next()?.parse().ok()?;
    let awaited = match words.next()? {
        "batch" => Awaited::Batch,
        "version" => Awaited::Version,
        _ => return None,
    };
    let policy = PolicyName::parse(words.next()?).ok()?;
    Some(WakeUp { replica, awaited, policy })
}

#[async_trait]
impl Peers for Channel {
    async fn tell(&self, wake_ups: Vec<WakeUp>) -> Result<(), StoreError> {
        Ok(self.notify(wake_ups.iter().map(payload).collect()).await?)
    }

    async fn listen(&self, heard: &(dyn Fn(Heard) + Send + Sync)) {
        // Nothing but the end of the pool ends it.
        let _ = self.pool.close_event().do_until(self.keep_listening(heard)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::ids::ReplicaId;

    #[test]
    fn what_is_told_is_read_as_it_was() {
        for awaited in [Awaited::Batch, Awaited::Version] {
            let policy = PolicyName::parse(&"p".repeat(128)).expect("a valid name");
            let wake_up = WakeUp { replica: ReplicaId::mint(), awaited, policy };
            assert!(payload(&wake_up).len() <= 173);
            assert_eq!(parse(&payload(&wake_up)), Some(wake_up));
        }
    }

    #[test]
    fn what_nobody_here_told_is_not_read() {
        let replica = ReplicaId::mint();
        for payload in [String::new(), "batch".to_owned(), format!("{replica} step p"), format!("{replica} batch a b")]
        {
            assert_eq!(parse(&payload), None, "{payload}");
        }
    }
}
