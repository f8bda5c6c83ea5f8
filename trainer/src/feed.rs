//! Leases batches ahead: while one batch is trained on, the next is already being fetched. A heartbeat keeps each lease
//! alive.
//!
//! This is separate from the loop because it runs in parallel with it. Batches are ordered by their leases, because one
//! task leases them one after the other.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use forebay_client::{
    Client, ClientError, Heartbeat, RetryPolicy,
    wire::{BatchDescriptor, BatchRequest, Sample},
};
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task::JoinHandle,
};

use crate::service::{Service, ServiceError, blames_the_batch};

/// Longest time that one request for a batch waits at the service. The feed repeats the request.
const WAIT: Duration = Duration::from_secs(30);

/// Pause after a request for a batch that was answered too early: a proxy in between may not wait.
const PAUSE: Duration = Duration::from_secs(1);

/// A leased batch with its rows. The lease is extended until the batch is consumed or this is dropped. The next batch
/// is leased only when this is dropped.
#[derive(Debug)]
pub struct Delivery {
    /// The batch, with its lease.
    pub batch: BatchDescriptor,
    /// One row per segment, in the order of the batch.
    pub rows: Vec<Sample>,
    /// The heartbeat ends with the lease: an acked batch has none to extend.
    heartbeat: Option<Heartbeat>,
    _room: OwnedSemaphorePermit,
}

impl Delivery {
    /// Whether the lease is known to be lost. Computing on the rows is then useless.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.heartbeat.as_ref().is_some_and(Heartbeat::is_lost)
    }

    /// Called when the batch is acked or given back.
    pub fn release(&mut self) {
        self.heartbeat = None;
    }
}

/// Leases batches in the background until it is dropped.
#[derive(Debug)]
pub struct Feed {
    deliveries: mpsc::Receiver<Result<Delivery, ServiceError>>,
    task: JoinHandle<()>,
}

/// A batch, and how long the trainer waited for it.
#[derive(Debug)]
pub struct Fed {
    /// The batch.
    pub delivery: Delivery,
    /// Time spent waiting.
    pub waited: Duration,
}

impl Feed {
    /// Leases up to `ahead` batches in addition to the one in training, in lineage `epoch`, each for `ttl` at a time.
    #[must_use]
    pub fn start(runtime: &Handle, service: Service, epoch: i64, ahead: usize, ttl: Duration) -> Self {
        let (sender, deliveries) = mpsc::channel(ahead + 1);
        let task = runtime.spawn(async move {
            let room = Arc::new(Semaphore::new(ahead + 1));
            for number in 1_u64.. {
                let Ok(room) = Arc::clone(&room).acquire_owned().await else { return };
                // Every attempt has the same request id, so that a batch is not lost with a lost answer.
                let delivery = next(&service, epoch, &format!("{epoch}-{number}"), ttl, room).await;
                let ends = delivery.is_err();
                if sender.send(delivery).await.is_err() || ends {
                    return;
                }
            }
        });
        Self { deliveries, task }
    }

    /// Returns the next batch, or `None` if `stop` is set while there is none.
    pub fn next(&mut self, runtime: &Handle, stop: &dyn Fn() -> bool) -> Result<Option<Fed>, ServiceError> {
        /// How often the stop flag is checked.
        const LOOK: Duration = Duration::from_millis(200);
        let started = Instant::now();
        while !stop() {
            let received = runtime.block_on(async { tokio::time::timeout(LOOK, self.deliveries.recv()).await });
            match received {
                Err(_) => {}
                Ok(Some(delivery)) => {
                    return delivery.map(|delivery| Some(Fed { delivery, waited: started.elapsed() }));
                }
                Ok(None) => break,
            }
        }
        Ok(None)
    }
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The next batch whose rows arrive completely.
async fn next(
    service: &Service,
    epoch: i64,
    request_id: &str,
    ttl: Duration,
    room: OwnedSemaphorePermit,
) -> Result<Delivery, ServiceError> {
    for attempt in 1_u64.. {
        let request = BatchRequest {
            policy: Some(service.policy().to_owned()),
            consumer: Some(service.consumer().to_owned()),
            request_id: Some(format!("{request_id}.{attempt}")),
            // A waiting service sends nothing, and this must not count as silence.
            wait_ms: Some(WAIT.min(service.silence_timeout() / 2).as_millis() as u64),
            partial: None,
            epoch: Some(epoch),
        };
        let batch = loop {
            let asked = Instant::now();
            if let Some(batch) = service.patiently("lease", || service.client().lease(&request)).await? {
                break batch;
            }
            if asked.elapsed() < PAUSE {
                tokio::time::sleep(PAUSE).await;
            }
        };
        let client = service.client().clone().with_retry(RetryPolicy::default());
        let heartbeat = Heartbeat::start(client, &batch, ttl)?;
        let read = service.patiently("samples", || async {
            // A batch that is damaged or gone never arrives; the service reports this by ending its lease.
            if heartbeat.is_lost() { Ok(None) } else { whole(service.client(), &batch).await.map(Some) }
        });
        match read.await {
            Ok(Some(rows)) => return Ok(Delivery { batch, rows, heartbeat: Some(heartbeat), _room: room }),
            Ok(None) => tracing::warn!(batch.id = batch.batch_id, "the lease was lost before the samples arrived"),
            Err(ServiceError::Client(error)) if blames_the_batch(&error) => {
                tracing::warn!(batch.id = batch.batch_id, %error, "the samples cannot be read; taking another batch");
                service.nack(&batch, "the samples cannot be read", None).await?;
            }
            Err(error) => return Err(error),
        }
    }
    unreachable!("attempts do not run out")
}

/// Reads the rows of a batch. Fails unless there are as many as the descriptor says.
async fn whole(client: &Client, batch: &BatchDescriptor) -> Result<Vec<Sample>, ClientError> {
    let rows = client.samples(&batch.batch_id, &[("messages", "false")]).await?;
    let expected = batch.samples as usize;
    if rows.len() == expected { Ok(rows) } else { Err(ClientError::Incomplete { answers: rows.len(), expected }) }
}
