//! The addresses under which agents reach a session.

use std::net::SocketAddr;

use axum::http::uri::Authority;
use forebay_domain::ids::SessionId;
use forebay_wire::BaseUrls;

/// Where agents reach the listener.
#[derive(Clone, Debug)]
pub struct AgentUrls {
    /// What an operator configured, such as the address of a proxy. It has no slash at its end.
    pub public: Option<String>,
    /// The bound address.
    pub address: SocketAddr,
    /// Whether connections are encrypted.
    pub is_encrypted: bool,
}

impl AgentUrls {
    /// The addresses of a session. `host` is how the producer names this machine, which is used where the listener is
    /// bound to all addresses.
    #[must_use]
    pub fn of(&self, session: SessionId, host: Option<&Authority>) -> BaseUrls {
        let base = match (&self.public, host) {
            (Some(public), _) => public.clone(),
            (None, Some(host)) if self.address.ip().is_unspecified() => {
                format!("{}://{}:{}", self.scheme(), host.host(), self.address.port())
            }
            _ => format!("{}://{}", self.scheme(), self.address),
        };
        // The client of Anthropic appends `/v1` itself.
        let anthropic = format!("{base}/sessions/{session}");
        BaseUrls { openai: format!("{anthropic}/v1"), anthropic }
    }

    fn scheme(&self) -> &'static str {
        if self.is_encrypted { "https" } else { "http" }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn openai(public: Option<&str>, address: &str, host: Option<&'static str>) -> String {
        let address = address.parse().expect("an address");
        let urls = AgentUrls { public: public.map(str::to_owned), address, is_encrypted: false };
        let session = SessionId::mint();
        let host = host.map(Authority::from_static);
        urls.of(session, host.as_ref()).openai.replace(&session.to_string(), "ID")
    }

    #[test]
    fn a_session_is_reached_where_the_producer_reaches_the_service() {
        assert_eq!(openai(None, "127.0.0.1:8081", Some("a:8080")), "http://127.0.0.1:8081/sessions/ID/v1");
        assert_eq!(openai(None, "0.0.0.0:8081", Some("a:8080")), "http://a:8081/sessions/ID/v1");
        assert_eq!(openai(None, "[::]:8081", Some("[::1]:8080")), "http://[::1]:8081/sessions/ID/v1");
        assert_eq!(openai(Some("https://p/x"), "0.0.0.0:8081", Some("a")), "https://p/x/sessions/ID/v1");
    }
}
