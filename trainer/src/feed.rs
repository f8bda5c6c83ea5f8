//! Batches, leased ahead: while one is trained the next is already on its way, each kept alive by a heartbeat.
//!
//! Separate from the loop because it runs beside it. The order of batches is the order of leases: one task takes them
//! one after the other.

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

/// Time that one request for a batch waits at the service; the feed asks again for as long as it lives.
const WAIT: Duration = Duration::from_secs(30);

/// Pause after a request for a batch that was answered before its time: a proxy in between may not wait.
const PAUSE: Duration = Duration::from_secs(1);

/// A leased batch with its rows. The lease is extended until it is consumed or this is dropped, and the next batch has
/// no room before this is dropped.
#[derive(Debug)]
pub struct Delivery {
    /// The batch, with its lease.
    pub batch: BatchDescriptor,
    /// One row per segment, in the order of the batch.
    pub rows: Vec<Sample>,
    /// Ends with the lease: a batch that is acked has none to extend.
    heartbeat: Option<Heartbeat>,
    _room: OwnedSemaphorePermit,
}

impl Delivery {
    /// Whether the lease is known to be lost: what is computed on the rows from now on is for nothing.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.heartbeat.as_ref().is_some_and(Heartbeat::is_lost)
    }

    /// The batch is acked or given back.
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

/// A batch, and how long the trainer stood still for it.
#[derive(Debug)]
pub struct Fed {
    /// The batch.
    pub delivery: Delivery,
    /// Time without work.
    pub waited: Duration,
}

impl Feed {
    /// Leases up to `ahead` batches beside the one in training, in lineage `epoch`, each for `ttl` at a time.
    #[must_use]
    pub fn start(runtime: &Handle, service: Service, epoch: i64, ahead: usize, ttl: Duration) -> Self {
        let (sender, deliveries) = mpsc::channel(ahead + 1);
        let task = runtime.spawn(async move {
            let room = Arc::new(Semaphore::new(ahead + 1));
            for number in 1_u64.. {
                let Ok(room) = Arc::clone(&room).acquire_owned().await else { return };
                // The same name at every attempt: a lost answer is not a lost batch.
                let delivery = next(&service, epoch, &format!("{epoch}-{number}"), ttl, room).await;
                let ends = delivery.is_err();
                if sender.send(delivery).await.is_err() || ends {
                    return;
                }
            }
        });
        Self { deliveries, task }
    }

    /// The next batch; `None` when `stop` says so while none is there.
    pub fn next(&mut self, runtime: &Handle, stop: &dyn Fn() -> bool) -> Result<Option<Fed>, ServiceError> {
        /// How soon a wish to stop is noticed.
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

/// The next batch whose rows arrive whole.
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
            wait_ms: Some(WAIT.as_millis() as u64),
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
            // A batch that is damaged or gone never arrives: the service says so by ending its lease.
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

/// The rows of a batch: as many as its descriptor says, or an error.
async fn whole(client: &Client, batch: &BatchDescriptor) -> Result<Vec<Sample>, ClientError> {
    let rows = client.samples(&batch.batch_id).await?;
    let expected = batch.samples as usize;
    if rows.len() == expected { Ok(rows) } else { Err(ClientError::Incomplete { answers: rows.len(), expected }) }
}
