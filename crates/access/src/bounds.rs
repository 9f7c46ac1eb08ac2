//! Limits each response of a member's API server before any other code buffers or parses it: the length of a body, the length of
//! a line of a watch, and the memory that the parsed JSON would take. Memory needs its own limit because a short text of empty
//! objects takes many times its length once it is parsed.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use kube::client::Body as RequestBody;
use tower::{BoxError, Layer, Service};

use crate::memory::{Account, Charge, OverBudget};

/// The maximum number of bytes in one response, or, for a watch, in each of its lines. By default etcd accepts objects of at most 1.5 MiB.
pub const MAX_RESPONSE: usize = 4 * 1024 * 1024;
/// The maximum number of bytes of memory for one parsed response or line, as `Weight` estimates them.
pub const MAX_PARSED: usize = 16 * 1024 * 1024;

/// While kube collects a body, memory holds it up to three times: as frames, as one buffer and as text.
const COPIES: usize = 3;

/// Estimates, from the structure of streamed JSON, the memory of its `serde_json::Value`. Measured on a 64-bit platform: a map of
/// one entry takes 640 bytes (a B-tree leaf of 632 and the allocator's overhead), and a non-empty array has room for four values of 32
/// bytes.
#[derive(Debug, Default)]
struct Weight {
    bytes: usize,
    in_string: bool,
    escaped: bool,
    /// `{` or `[` if only white space has followed it yet, so that the map or array may be empty.
    opened: Option<u8>,
}

impl Weight {
    // The bytes of a non-empty map, of a non-empty array, of each further entry, and of a string without its text.
    const MAP: usize = 640;
    const ARRAY: usize = 160;
    const ENTRY: usize = 112;
    const STRING: usize = 32;

    fn add(&mut self, byte: u8) {
        if self.in_string {
            self.bytes += 1;
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
            return;
        }
        if byte.is_ascii_whitespace() {
            return;
        }
        if let Some(opened) = self.opened.take()
            && !matches!(byte, b'}' | b']')
        {
            self.bytes += if opened == b'{' { Self::MAP } else { Self::ARRAY };
        }
        match byte {
            b'{' | b'[' => self.opened = Some(byte),
            b',' => self.bytes += Self::ENTRY,
            b'"' => {
                self.in_string = true;
                self.bytes += Self::STRING;
            }
            _ => {}
        }
    }
}

/// Measures one response while it is read.
#[derive(Debug)]
struct Meter {
    /// Whether this is a successful response to a watch. Then each line has its own limit.
    is_watch: bool,
    /// Bytes of the response, or of the current line of a watch.
    length: usize,
    /// The highest `length` so far. kube keeps a buffer of this size, also after a shorter line of a watch.
    longest: usize,
    weight: Weight,
    charge: Charge,
}

impl Meter {
    fn new(is_watch: bool, account: &Account) -> Self {
        Self {
            is_watch,
            length: 0,
            longest: 0,
            weight: Weight::default(),
            charge: account.charge(),
        }
    }

    fn add(&mut self, data: &[u8]) -> Result<(), OverBudget> {
        for byte in data {
            if self.is_watch && *byte == b'\n' {
                self.length = 0;
                self.weight = Weight::default();
                continue;
            }
            self.length += 1;
            self.weight.add(*byte);
            self.longest = self.longest.max(self.length);
            let over = if self.length > MAX_RESPONSE && self.is_watch {
                OverBudget::Event(MAX_RESPONSE)
            } else if self.length > MAX_RESPONSE {
                OverBudget::Response(MAX_RESPONSE)
            } else if self.weight.bytes > MAX_PARSED {
                OverBudget::Values(MAX_PARSED)
            } else {
                continue;
            };
            return Err(self.charge.account().refuse(over));
        }
        self.charge.set(self.longest * COPIES)
    }
}

/// A body whose next frame is the error [`OverBudget`] when the body exceeds a limit of its own, or a limit of its [`Account`].
#[derive(Debug)]
pub struct Bounded<B> {
    inner: B,
    /// `None` = [`OverBudget`] was returned, and no more of the body is read.
    meter: Option<Meter>,
}

impl<B> Body for Bounded<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Self { inner, meter } = &mut *self;
        let Some(counting) = meter else {
            return Poll::Ready(None);
        };
        let frame = ready!(Pin::new(inner).poll_frame(cx));
        let data = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref());
        if let Some(Err(over)) = data.map(|data| counting.add(data)) {
            *meter = None;
            return Poll::Ready(Some(Err(over.into())));
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.meter.is_none() || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A tower layer that limits all responses of a service.
#[derive(Debug, Clone)]
pub struct BoundLayer(Account);

impl BoundLayer {
    /// Creates a layer that charges the memory of bodies in transfer to `account`.
    #[must_use]
    pub const fn new(account: Account) -> Self {
        Self(account)
    }
}

impl<S> Layer<S> for BoundLayer {
    type Service = BoundService<S>;

    fn layer(&self, inner: S) -> BoundService<S> {
        BoundService {
            inner,
            account: self.0.clone(),
        }
    }
}

/// A service whose responses are limited.
#[derive(Debug, Clone)]
pub struct BoundService<S> {
    inner: S,
    account: Account,
}

impl<S, B> Service<Request<RequestBody>> for BoundService<S>
where
    S: Service<Request<RequestBody>, Response = Response<B>, Error = BoxError>,
    S::Future: Send + 'static,
    B: 'static,
{
    type Response = Response<Bounded<B>>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<RequestBody>) -> Self::Future {
        let query = request.uri().query().unwrap_or_default();
        let is_watch = query.split('&').any(|parameter| parameter == "watch=true");
        let (account, answer) = (self.account.clone(), self.inner.call(request));
        Box::pin(async move {
            let answer = answer.await?;
            let meter = Meter::new(is_watch && answer.status().is_success(), &account);
            Ok(answer.map(|inner| Bounded {
                inner,
                meter: Some(meter),
            }))
        })
    }
}

/// Returns the [`OverBudget`] in the chain of causes of `error`.
#[must_use]
pub fn over_budget(error: &(dyn std::error::Error + 'static)) -> Option<OverBudget> {
    crate::cause(error)
}

#[cfg(test)]
mod tests;
