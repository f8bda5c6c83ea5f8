//! The connection to the other replicas: `LISTEN` and `NOTIFY`.
//!
//! `NOTIFY` never runs inside a transaction that changes anything, because the server commits transactions with a
//! `NOTIFY` one at a time.

use std::{io, time::Duration};

use async_trait::async_trait;
use forebay_domain::{
    ids::PolicyName,
    peers::{Awaited, Notification, WakeUp},
};
use sqlx::{
    PgPool,
    postgres::{PgListener, PgNotification, PgPoolOptions},
};
use uuid::Uuid;

use super::{ACQUIRE_TIMEOUT, BEGIN_WRITE, session};
use crate::{error::StoreError, peers::Peers};

/// The name of the channel. Channels of different databases are separate.
const CHANNEL: &str = "forebay";

/// Pause before the next attempt to listen.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

/// Pause before the next attempt to listen behind a pooler, which is seldom removed while the service runs.
const ASK_POOLER_AGAIN: Duration = Duration::from_mins(1);

/// Time without a notification after which the connection is tested. Networks drop idle connections without telling
/// either end.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// How long an echo may take to come back.
const ECHO_TIMEOUT: Duration = Duration::from_secs(5);

/// The payload of the test message. It wakes no waiter.
const ECHO: &str = "echo";

/// Publishes on any connection of the pool, and listens on a connection of its own.
pub(super) struct Channel {
    pool: PgPool,
}

impl Channel {
    pub(super) fn new(pool: PgPool) -> Self {
        Self { pool }
    }

    /// Listens, and tries again whenever that fails.
    async fn keep_listening(&self, notify: &(dyn Fn(Notification) + Send + Sync)) {
        let mut fails = false;
        loop {
            let (error, pause) = match self.subscribe().await {
                Ok(Some(listener)) => {
                    if fails {
                        tracing::info!("notifications of other replicas are received again");
                    }
                    fails = false;
                    notify(Notification::Arrive);
                    let error = self.hear(listener, notify).await;
                    notify(Notification::Lost);
                    (error.to_string(), LISTEN_AGAIN)
                }
                Ok(None) => ("a pooler such as PgBouncer is in between".to_owned(), ASK_POOLER_AGAIN),
                Err(error) => (error.to_string(), LISTEN_AGAIN),
            };
            if !fails {
                tracing::warn!(error, "notifications of other replicas are lost; waiters poll");
            }
            fails = true;
            tokio::time::sleep(pause).await;
        }
    }

    /// Opens a connection of its own and listens on it. None if it leads to a pooler.
    ///
    /// A pooler that gives each transaction another session accepts a `LISTEN`. It then sends the notifications to the
    /// client that uses that session at the time, in the middle of other answers.
    async fn subscribe(&self) -> Result<Option<PgListener>, sqlx::Error> {
        let mark = Uuid::new_v4();
        let options = session::mark_with(self.pool.connect_options().as_ref().clone(), mark);
        // Each attempt has a pool of its own. In a shared pool, a connection that cannot be closed would keep the only
        // slot.
        let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(ACQUIRE_TIMEOUT);
        let pool = match pool.connect_with(options).await {
            Err(error) if session::is_refused_parameter(&error) => return Ok(None),
            connected => connected?,
        };
        let mut listener = PgListener::connect_with(&pool).await?;
        if !session::has_mark(&mut listener, mark).await? {
            return Ok(None);
        }
        listener.eager_reconnect(false);
        listener.listen(CHANNEL).await?;
        self.echo(&mut listener).await?;
        Ok(Some(listener))
    }

    /// Passes notifications on until the connection is lost. Returns the error that showed the loss.
    async fn hear(&self, mut listener: PgListener, notify: &(dyn Fn(Notification) + Send + Sync)) -> sqlx::Error {
        loop {
            match self.next(&mut listener).await {
                // Any client may notify. A payload that cannot be read is from another program or a later version.
                Ok(told) => parse(told.payload()).into_iter().for_each(|wake_up| notify(Notification::WakeUp(wake_up))),
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

    /// Publishes a test message, and returns the next notification, which is the message or an earlier one.
    async fn echo(&self, listener: &mut PgListener) -> Result<PgNotification, sqlx::Error> {
        self.notify(vec![ECHO.to_owned()]).await?;
        match tokio::time::timeout(ECHO_TIMEOUT, listener.try_recv()).await {
            Ok(told) => unless_lost(told),
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "no notification was received").into()),
        }
    }

    async fn notify(&self, payloads: Vec<String>) -> Result<(), sqlx::Error> {
        let pool = self.pool.clone();
        // If the caller were dropped in between, the connection would be left in an unknown state.
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

/// A listener returns none when its connection is lost.
fn unless_lost(told: Result<Option<PgNotification>, sqlx::Error>) -> Result<PgNotification, sqlx::Error> {
    told?.ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionAborted).into())
}

/// `REPLICA AWAITED POLICY`: at most 178 bytes, of the 7,999 that a notification may have.
fn payload(wake_up: &WakeUp) -> String {
    let awaited = match wake_up.awaited {
        Awaited::Batch => "batch",
        Awaited::Version => "version",
        Awaited::Work => "work",
    };
    format!("{} {awaited} {}", wake_up.replica, wake_up.policy.as_str())
}

fn parse(payload: &str) -> Option<WakeUp> {
    let mut words = payload.splitn(3, ' ');
    let replica = words.next()?.parse().ok()?;
    let awaited = match words.next()? {
        "batch" => Awaited::Batch,
        "version" => Awaited::Version,
        "work" => Awaited::Work,
        _ => return None,
    };
    let policy = PolicyName::stored(words.next()?).ok()?;
    Some(WakeUp { replica, awaited, policy })
}

#[async_trait]
impl Peers for Channel {
    async fn publish(&self, wake_ups: Vec<WakeUp>) -> Result<(), StoreError> {
        Ok(self.notify(wake_ups.iter().map(payload).collect()).await?)
    }

    async fn listen(&self, notify: &(dyn Fn(Notification) + Send + Sync)) {
        // Only the end of the pool ends the loop.
        let _ = self.pool.close_event().do_until(self.keep_listening(notify)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_domain::ids::ReplicaId;

    #[test]
    fn what_is_told_is_read_as_it_was() {
        for awaited in [Awaited::Batch, Awaited::Version, Awaited::Work] {
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
