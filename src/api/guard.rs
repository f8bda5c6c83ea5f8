//! Who may come in: decided from a request's head, before its body is read.
//!
//! Three doors, each for another stranger. Host and origin keep out web pages: a browser on this machine reaches
//! loopback for whatever page it shows. The key says who calls, and [`roles`] what that caller may do. What depends on
//! the policy comes later, where the policy is known: see [`Grant::check`].

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{
    body::HttpBody as _,
    extract::{FromRequestParts, MatchedPath, Request, State},
    http::{HeaderMap, Method, StatusCode, Uri, header, request::Parts, uri::Authority},
    middleware::Next,
    response::{IntoResponse, Response},
};

use super::{Api, body, problem::Failure, roles};
use crate::{
    access::{
        Grant,
        keyring::{Denied, Keyring},
    },
    buffer::ids::CallerId,
};

/// Media types that a page may post anywhere without asking first.
const FORM_TYPES: [&str; 3] = ["application/x-www-form-urlencoded", "multipart/form-data", "text/plain"];

/// Refused callers are logged this often at most: who knocks must not fill the log.
const LOG_EVERY: Duration = Duration::from_secs(1);

/// What the service is told about who may come in.
#[derive(Clone)]
pub struct Access {
    /// The keys.
    pub keyring: Arc<Keyring>,
    /// Names by which the service is known, in lower case and without ports.
    pub hosts: Arc<[String]>,
}

/// The doors of one listener.
#[derive(Clone)]
pub(super) struct Guard {
    pub(super) keyring: Arc<Keyring>,
    hosts: Hosts,
    log: Arc<Mutex<RefusalLog>>,
}

impl Guard {
    pub(super) fn new(access: Access, listen: SocketAddr) -> Self {
        Self { keyring: access.keyring, hosts: Hosts { known: access.hosts, listen }, log: Arc::default() }
    }

    /// What the caller may do, or why it is not let in, with the reason's name.
    fn admit(&self, request: &Request) -> Result<Option<Grant>, (&'static str, Failure)> {
        let (headers, method) = (request.headers(), request.method());
        let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
        let needs = route.map(|route| roles::needs(method, route));
        let host = host(request.uri(), headers);
        // Probes reach the service by whatever address they know, and learn nothing.
        let is_probe = matches!(route, Some("/healthz" | "/readyz"));
        if !is_probe && !self.hosts.accept(host.as_ref(), self.keyring.is_required()) {
            return Err(("host", wrong_host()));
        }
        if !method.is_safe() && !self.hosts.accept_origin(headers, host.as_ref()) {
            return Err(("origin", cross_origin()));
        }
        if needs == Some(roles::Needs::Nothing) {
            return Ok(None);
        }
        let grant = bearer(headers).and_then(|key| self.keyring.admit(key));
        let grant = grant.map_err(|denied| (denied.as_str(), unauthorized(denied)))?;
        match needs.and_then(|needs| needs.lacking(&grant)) {
            Some(why) => Err(("forbidden", forbidden(&why))),
            None => Ok(Some(grant)),
        }
    }

    fn report(&self, reason: &str) {
        let Some(silent) = self.log.lock().unwrap_or_else(PoisonError::into_inner).due(Instant::now()) else { return };
        // Neither the key nor anything else that the stranger chose.
        tracing::warn!(reason, unlogged = silent, "a caller was not let in");
    }
}

/// Refusals since the last one that was logged.
#[derive(Debug, Default)]
struct RefusalLog {
    logged_at: Option<Instant>,
    silent: u64,
}

impl RefusalLog {
    /// How many went unlogged before this one, if this one may be logged.
    fn due(&mut self, now: Instant) -> Option<u64> {
        if self.logged_at.is_some_and(|at| now.duration_since(at) < LOG_EVERY) {
            self.silent += 1;
            return None;
        }
        self.logged_at = Some(now);
        Some(std::mem::take(&mut self.silent))
    }
}

/// Lets a request in, with its [`Grant`], or answers why not.
pub(super) async fn guard(State(api): State<Api>, mut request: Request, next: Next) -> Response {
    match api.guard.admit(&request) {
        Ok(Some(grant)) => {
            if is_form(&request) {
                return body::unsupported("Content-Type must not be that of a form").into_response();
            }
            if let Some(key_id) = &grant.key_id {
                tracing::Span::current().record("key.id", key_id.as_str());
            }
            request.extensions_mut().insert(grant);
            next.run(request).await
        }
        Ok(None) => next.run(request).await,
        Err((reason, failure)) => {
            api.metrics.auth_failed(reason);
            api.guard.report(reason);
            turn_away(request);
            failure.into_response()
        }
    }
}

/// Lets the body of a refused request pass by while the answer is on its way, because closing on a client that still
/// sends would reset the connection, and with it the answer.
pub(super) fn turn_away(request: Request) {
    // Who asked before sending is told no, and sends nothing.
    if request.headers().contains_key(header::EXPECT) || request.body().is_end_stream() {
        return;
    }
    tokio::spawn(body::linger(request.into_body()));
}

/// What the caller may do: the grant that [`guard`] left. Without one nothing is granted.
pub(super) struct Caller(pub(super) Grant);

impl FromRequestParts<Api> for Caller {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _api: &Api) -> Result<Self, Failure> {
        parts.extensions.get().cloned().map(Self).ok_or_else(|| unauthorized(Denied::Missing))
    }
}

/// The caller whose share of what is scarce a request takes: none where no key is needed.
pub(super) fn caller_id(grant: &Grant) -> Option<CallerId> {
    grant.key_id.as_ref().map(|key_id| CallerId::new(key_id.as_str()))
}

/// The key in `Authorization: Bearer`, if there is one.
fn bearer(headers: &HeaderMap) -> Result<Option<&str>, Denied> {
    let mut sent = headers.get_all(header::AUTHORIZATION).iter();
    let Some(value) = sent.next() else { return Ok(None) };
    // Of two, another reader might take the other.
    if sent.next().is_some() {
        return Err(Denied::Invalid);
    }
    let (scheme, key) = value.to_str().ok().and_then(|text| text.split_once(' ')).ok_or(Denied::Invalid)?;
    if scheme.eq_ignore_ascii_case("bearer") { Ok(Some(key.trim())) } else { Err(Denied::Invalid) }
}

/// The host that a request is for.
fn host(uri: &Uri, headers: &HeaderMap) -> Option<Authority> {
    if let Some(authority) = uri.authority() {
        return Some(authority.clone());
    }
    let mut sent = headers.get_all(header::HOST).iter();
    let only = sent.next().filter(|_| sent.next().is_none())?;
    Authority::try_from(only.as_bytes()).ok()
}

/// A host's name in lower case, an IPv6 address without its brackets.
fn name(authority: &Authority) -> String {
    authority.host().trim_start_matches('[').trim_end_matches(']').to_ascii_lowercase()
}

/// Names by which the service may be called.
#[derive(Clone)]
struct Hosts {
    known: Arc<[String]>,
    listen: SocketAddr,
}

impl Hosts {
    /// Whether a request is for this service.
    ///
    /// A page can make its own name resolve to 127.0.0.1, and then reads what this service answers as its own: only
    /// the name gives it away. It has no key, so where keys are needed any name will do, unless names were configured.
    fn accept(&self, host: Option<&Authority>, key_required: bool) -> bool {
        let is_loopback = self.listen.ip().to_canonical().is_loopback();
        if self.known.is_empty() && (key_required || !is_loopback) {
            return true;
        }
        host.is_some_and(|host| self.names(&name(host)))
    }

    fn names(&self, host: &str) -> bool {
        let address = host.parse::<IpAddr>().map(|address| address.to_canonical()).ok();
        host == "localhost"
            || address.is_some_and(|address| address.is_loopback() || address == self.listen.ip().to_canonical())
            || self.known.iter().any(|known| known == host)
    }

    /// Whether a change comes from no page, or from one of this service.
    fn accept_origin(&self, headers: &HeaderMap, host: Option<&Authority>) -> bool {
        let Some(origin) = headers.get(header::ORIGIN) else { return true };
        let origin = origin.to_str().ok().and_then(|text| text.parse::<Uri>().ok());
        // `null` is the origin of pages that hide theirs.
        let Some((origin, scheme)) = origin.as_ref().and_then(|uri| Some((uri.authority()?, uri.scheme_str()?))) else {
            return false;
        };
        let default = if scheme == "https" { 443 } else { 80 };
        let port = |authority: &Authority| authority.port_u16().unwrap_or(default);
        let same = |host: &Authority| name(origin) == name(host) && port(origin) == port(host);
        // A proxy may have put another name into the request than the one the page was loaded by.
        host.is_some_and(same) || self.known.contains(&name(origin))
    }
}

/// Whether a request has a body that a page could have posted, even an empty one.
fn is_form(request: &Request) -> bool {
    let sent = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media = sent.split(';').next().unwrap_or_default().trim();
    *request.method() != Method::GET && FORM_TYPES.iter().any(|form| media.eq_ignore_ascii_case(form))
}

fn unauthorized(denied: Denied) -> Failure {
    let detail = match denied {
        Denied::Missing => "send a key: `Authorization: Bearer fb_...`",
        Denied::Invalid => "the key is none of this service's, or it is revoked",
        Denied::Expired => "the key has expired",
    };
    Failure::new(StatusCode::UNAUTHORIZED, "unauthorized", "A valid key is needed").detail(detail)
}

fn forbidden(why: &str) -> Failure {
    Failure::new(StatusCode::FORBIDDEN, "forbidden", "The key does not allow this").detail(why)
}

fn wrong_host() -> Failure {
    Failure::new(StatusCode::MISDIRECTED_REQUEST, "wrong-host", "The request is for another host")
        .detail("name the hosts by which this service is called in `hosts` of `[access]`, or use 127.0.0.1")
}

fn cross_origin() -> Failure {
    Failure::new(StatusCode::FORBIDDEN, "cross-origin", "Pages of other origins may change nothing")
        .detail("`Origin` must be that of this service, or its host one of `hosts` in `[access]`")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(listen: &str, known: &[&str]) -> Hosts {
        let known = known.iter().map(|&name| name.to_owned()).collect();
        Hosts { known, listen: listen.parse().expect("it is an address") }
    }

    fn accepts(hosts: &Hosts, host: &str, key_required: bool) -> bool {
        hosts.accept(Authority::try_from(host).ok().as_ref(), key_required)
    }

    #[test]
    fn on_loopback_without_keys_only_local_names_are_this_service() {
        let hosts = hosts("127.0.0.1:8080", &[]);
        for host in ["localhost", "LocalHost:8080", "127.0.0.1:8080", "[::1]:8080", "127.1.2.3"] {
            assert!(accepts(&hosts, host, false), "{host}");
        }
        for host in ["evil.example", "localhost.evil.example:8080", "10.0.0.1", ""] {
            assert!(!accepts(&hosts, host, false), "{host}");
            assert!(accepts(&hosts, host, true), "{host}: a page has no key");
        }
    }

    #[test]
    fn configured_names_are_the_only_ones_besides_local_ones() {
        let hosts = hosts("0.0.0.0:8080", &["forebay.example"]);
        assert!(accepts(&hosts, "Forebay.Example:443", true) && accepts(&hosts, "localhost", true));
        assert!(!accepts(&hosts, "other.example", true));
    }

    #[test]
    fn an_origin_is_that_of_the_host() {
        let hosts = hosts("127.0.0.1:8080", &["forebay.example"]);
        let accepts = |origin: &'static str, host: &'static str| {
            let headers = HeaderMap::from_iter([(header::ORIGIN, header::HeaderValue::from_static(origin))]);
            hosts.accept_origin(&headers, Some(&Authority::from_static(host)))
        };
        assert!(accepts("http://localhost:8080", "localhost:8080"));
        assert!(accepts("http://a.example", "a.example:80") && accepts("https://a.example:443", "a.example"));
        assert!(accepts("https://forebay.example", "127.0.0.1:8080"), "a proxy in front");
        for origin in ["http://localhost:3000", "http://evil.example", "null", "http://evil.example/localhost:8080"] {
            assert!(!accepts(origin, "localhost:8080"), "{origin}");
        }
    }

    #[test]
    fn refusals_are_logged_once_a_second_with_what_went_unlogged() {
        let (mut log, start) = (RefusalLog::default(), Instant::now());
        assert_eq!(log.due(start), Some(0));
        assert_eq!((log.due(start), log.due(start)), (None, None));
        assert_eq!(log.due(start + LOG_EVERY), Some(2));
    }
}
