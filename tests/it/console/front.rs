//! An address that stays while the service behind it stops and starts again.

use std::sync::{Arc, Mutex};

use tokio::{
    net::{TcpListener, TcpStream},
    task::{JoinHandle, JoinSet},
};

/// Forwards connections to a service.
pub(super) struct Front {
    pub(super) url: String,
    target: Arc<Mutex<Option<String>>>,
    connections: Arc<Mutex<JoinSet<()>>>,
    accepting: JoinHandle<()>,
}

impl Front {
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let url = format!("http://{}", listener.local_addr().expect("a listener has an address"));
        let (target, connections) = (Arc::<Mutex<Option<String>>>::default(), Arc::<Mutex<JoinSet<()>>>::default());
        let (to, open) = (Arc::clone(&target), Arc::clone(&connections));
        let accepting = tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                // Without a service, the connection is closed at once.
                let Some(address) = to.lock().expect("nobody panics in it").clone() else { continue };
                open.lock().expect("nobody panics in it").spawn(async move {
                    if let Ok(mut service) = TcpStream::connect(address).await {
                        // The end of a connection, however it comes about, is the end of this task.
                        let _ = tokio::io::copy_bidirectional(&mut client, &mut service).await;
                    }
                });
            }
        });
        Self { url, target, connections, accepting }
    }

    /// Forwards to the service at this address from now on.
    pub(super) fn point_to(&self, url: &str) {
        let address = url.strip_prefix("http://").expect("the test's service speaks plain HTTP");
        *self.target.lock().expect("nobody panics in it") = Some(address.to_owned());
    }

    /// Closes all connections, and from now on each new one.
    pub(super) fn cut(&self) {
        *self.target.lock().expect("nobody panics in it") = None;
        self.connections.lock().expect("nobody panics in it").abort_all();
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}
