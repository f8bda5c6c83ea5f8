//! A few connections that only read, each on the thread of its caller, so that megabytes of a batch are not handed from
//! one thread to another row by row.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::{runtime::Handle, sync::Semaphore, task::spawn_blocking};

use super::direct::Direct;
use crate::{
    error::StoreError,
    op::{AnyOp, AnyOutput},
    rules_cache::RulesCache,
    sql::{Connection as _, Statement, Tx},
};

/// Batches are read in large pieces, so a few connections suffice.
const READERS_MAX: u32 = 4;

/// Connections that readers take in turn. Each is opened when it is first needed.
#[derive(Debug)]
pub(super) struct Readers {
    path: PathBuf,
    turns: Arc<Semaphore>,
    idle: Arc<Mutex<Vec<Direct>>>,
    rules: Arc<RulesCache>,
}

impl Readers {
    /// Opens the first connection, so that errors show at the start.
    pub(super) fn open(path: PathBuf, rules: Arc<RulesCache>) -> Result<Self, rusqlite::Error> {
        let idle = Arc::new(Mutex::new(vec![Direct::reading(&path)?]));
        Ok(Self { path, turns: Arc::new(Semaphore::new(READERS_MAX as usize)), idle, rules })
    }

    /// Runs an operation on a consistent snapshot. It continues if the caller is dropped.
    pub(super) async fn read(&self, op: Box<dyn AnyOp>) -> Result<AnyOutput, StoreError> {
        let turn = Arc::clone(&self.turns).acquire_owned().await.map_err(|_| StoreError::Closed)?;
        let (path, idle, rules) = (self.path.clone(), Arc::clone(&self.idle), Arc::clone(&self.rules));
        let runtime = Handle::current();
        let read = spawn_blocking(move || {
            let _turn = turn;
            let known = idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let mut connection = known.map_or_else(|| Direct::reading(&path), Ok)?;
            let output = runtime.block_on(snapshot(&mut connection, &*op, &rules))?;
            // After an error the state of the connection is unknown. It is dropped, and another is opened when one is
            // needed.
            idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
            Ok(output)
        });
        read.await.map_err(|_| StoreError::Closed)?
    }

    /// Waits for running reads, and closes the connections.
    pub(super) async fn close(&self) {
        let _all = self.turns.acquire_many(READERS_MAX).await;
        self.turns.close();
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

async fn snapshot(connection: &mut Direct, op: &dyn AnyOp, rules: &RulesCache) -> Result<AnyOutput, StoreError> {
    connection.execute(Statement::new("BEGIN"), Vec::new()).await?;
    let output = op.run(&mut Tx::new(connection, rules)).await?;
    connection.execute(Statement::new("ROLLBACK"), Vec::new()).await?;
    Ok(output)
}
