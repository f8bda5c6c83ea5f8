//! A proxy between the service and Postgres, by TCP, that counts round trips and can make each of them take time.
//!
//! Separate from the clusters, because only some tests look at what is on the wire.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use sqlx::postgres::PgConnectOptions;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
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

impl Connection {
    fn ask(&mut self, bytes: &[u8]) {
        if std::mem::take(&mut self.is_answered) || self.messages.is_empty() {
            self.messages.push(Message::new());
        }
        self.messages.last_mut().expect("one was added").extend_from_slice(bytes);
    }
}

/// A proxy. It ends with the runtime of its test.
pub(crate) struct Proxy {
    url: String,
    connections: Connections,
}

impl Proxy {
    /// Starts a proxy to a database of a test's cluster, which passes bytes on after `delay`, in both directions.
    pub(crate) async fn start(database: &str, delay: Duration) -> Self {
        let options: PgConnectOptions = database.parse().expect("the URL was made by a test");
        let name = options.get_database().expect("the URL names a database");
        let server = (options.get_host().to_owned(), options.get_port());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let port = listener.local_addr().expect("it listens").port();
        let connections = Connections::default();
        let seen = Arc::clone(&connections);
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.expect("the system has sockets");
                let server = TcpStream::connect(server.clone()).await.expect("the server accepts");
                for socket in [&client, &server] {
                    socket.set_nodelay(true).expect("the socket is open");
                }
                let number = {
                    let mut seen = seen.lock().expect("nobody panics");
                    seen.push(Connection::default());
                    seen.len() - 1
                };
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = server.into_split();
                let (asked, answered) = (Arc::clone(&seen), Arc::clone(&seen));
                let ask = move |bytes: &[u8]| asked.lock().expect("nobody panics")[number].ask(bytes);
                let answer = move |_: &[u8]| answered.lock().expect("nobody panics")[number].is_answered = true;
                tokio::spawn(pass(from_client, to_server, delay, ask));
                tokio::spawn(pass(from_server, to_client, delay, answer));
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

/// Passes bytes on, each piece at its time. What follows a piece does not wait for that.
async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, delay: Duration, see: impl Fn(&[u8])) {
    let (sender, mut pieces) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    let write = async move {
        while let Some((at, piece)) = pieces.recv().await {
            if !delay.is_zero() {
                tokio::time::sleep_until(at).await;
            }
            if to.write_all(&piece).await.is_err() {
                break;
            }
        }
        let _ = to.shutdown().await;
    };
    let read = async move {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(count @ 1..) = from.read(&mut bytes).await {
            see(&bytes[..count]);
            if sender.send((Instant::now() + delay, bytes[..count].to_vec())).is_err() {
                break;
            }
        }
    };
    tokio::join!(write, read);
}
