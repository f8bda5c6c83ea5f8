//! A proxy between the service and Postgres, by TCP, that counts round trips and can make each of them take time.
//!
//! Separate from the clusters, which listen in a folder: no port has to be free, and tests see what is on the wire.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt},
    net::{
        TcpListener, UnixStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
        unix,
    },
    sync::mpsc,
    time::Instant,
};

/// What the service sent on one connection before it waited for an answer.
type Message = Vec<u8>;

/// The messages of every connection, in order.
type Connections = Arc<Mutex<Vec<Connection>>>;

#[derive(Default)]
struct Connection {
    messages: Vec<Message>,
    /// The server has answered since the last message.
    is_answered: bool,
}

/// A proxy. It ends with the runtime of its test.
pub(crate) struct Proxy {
    url: String,
    connections: Connections,
}

impl Proxy {
    /// Starts a proxy to a database of a test's cluster, which passes bytes on after `delay`, in both directions.
    pub(crate) async fn start(database: &str, delay: Duration) -> Self {
        let (address, cluster) = database.split_once("?host=").expect("the cluster listens in a folder");
        let name = address.rsplit('/').next().expect("the URL names a database");
        let socket = PathBuf::from(cluster).join(".s.PGSQL.5432");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let port = listener.local_addr().expect("it listens").port();
        let connections = Connections::default();
        let seen = Arc::clone(&connections);
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.expect("the system has sockets");
                client.set_nodelay(true).expect("the socket is open");
                let server = UnixStream::connect(&socket).await.expect("the server accepts");
                let number = {
                    let mut seen = seen.lock().expect("nobody panics");
                    seen.push(Connection::default());
                    seen.len() - 1
                };
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = server.into_split();
                tokio::spawn(ask(from_client, to_server, delay, number, Arc::clone(&seen)));
                tokio::spawn(answer(from_server, to_client, delay, number, Arc::clone(&seen)));
            }
        });
        Self { url: format!("postgres://forebay@127.0.0.1:{port}/{name}?sslmode=disable"), connections }
    }

    /// The URL of the database through the proxy.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The messages of every committed transaction that contains these bytes, which cost a round trip each.
    pub(crate) fn transactions_with(&self, content: &str) -> Vec<Vec<Message>> {
        let connections = self.connections.lock().expect("nobody panics");
        let mut found = Vec::new();
        for Connection { messages, .. } in connections.iter() {
            let mut transaction = Vec::new();
            for message in messages {
                if contains(message, "BEGIN ISOLATION LEVEL READ COMMITTED;") {
                    transaction.clear();
                }
                transaction.push(message.clone());
                if contains(message, "COMMIT\0") && transaction.iter().any(|message| contains(message, content)) {
                    found.push(std::mem::take(&mut transaction));
                }
            }
        }
        found
    }
}

fn contains(message: &[u8], content: &str) -> bool {
    message.windows(content.len()).any(|window| window == content.as_bytes())
}

async fn ask(
    mut from: OwnedReadHalf,
    to: unix::OwnedWriteHalf,
    delay: Duration,
    number: usize,
    connections: Connections,
) {
    let to = later(to, delay);
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        {
            let mut connections = connections.lock().expect("nobody panics");
            let connection = &mut connections[number];
            if std::mem::take(&mut connection.is_answered) || connection.messages.is_empty() {
                connection.messages.push(Vec::new());
            }
            connection.messages.last_mut().expect("one was added").extend_from_slice(&bytes[..count]);
        }
        if to.send((Instant::now() + delay, bytes[..count].to_vec())).is_err() {
            break;
        }
    }
}

async fn answer(
    mut from: unix::OwnedReadHalf,
    to: OwnedWriteHalf,
    delay: Duration,
    number: usize,
    connections: Connections,
) {
    let to = later(to, delay);
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        connections.lock().expect("nobody panics")[number].is_answered = true;
        if to.send((Instant::now() + delay, bytes[..count].to_vec())).is_err() {
            break;
        }
    }
}

/// Writes each piece at its time. What follows it does not wait for that.
fn later(
    mut to: impl AsyncWriteExt + Unpin + Send + 'static,
    delay: Duration,
) -> mpsc::UnboundedSender<(Instant, Vec<u8>)> {
    let (sender, mut pieces) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    tokio::spawn(async move {
        while let Some((at, piece)) = pieces.recv().await {
            if !delay.is_zero() {
                tokio::time::sleep_until(at).await;
            }
            if to.write_all(&piece).await.is_err() {
                break;
            }
        }
        let _ = to.shutdown().await;
    });
    sender
}
