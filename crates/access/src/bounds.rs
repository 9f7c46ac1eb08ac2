//! Limits every answer of a member's API server below all code that collects, splits or parses it: the length of a body, the
//! length of a line of a watch, and the number of JSON values in both. The number matters because a short text of empty objects
//! takes many times its length once it is parsed.

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

/// Bytes of one answer, and of one line of a watch. An object of etcd is 1.5 MiB at most.
pub const MAX_ANSWER: usize = 4 * 1024 * 1024;
/// Memory that parsing one answer or one line may take, as `Weight` estimates it.
pub const MAX_PARSED: usize = 16 * 1024 * 1024;

/// The body is held as frames, as one buffer and as text while kube collects it.
const COPIES: usize = 3;

/// Estimates, from the structure of streamed JSON, the memory of its `serde_json::Value`. Measured on 64-bit: a map of one entry
/// is a B-tree leaf of 640 bytes, and a non-empty array has room for four values of 32 bytes.
#[derive(Debug, Default)]
struct Weight {
    bytes: usize,
    in_string: bool,
    escaped: bool,
    /// The last structural byte opened a map or an array.
    opened: Option<u8>,
}

impl Weight {
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

/// Counts length and estimated weight of one answer while it is read.
#[derive(Debug)]
struct Meter {
    /// A watch: each line is an answer of its own.
    lines: bool,
    /// Bytes of the answer or of the current line.
    length: usize,
    /// The longest line so far: readers keep a buffer of its size.
    longest: usize,
    weight: Weight,
    charge: Charge,
}

impl Meter {
    fn new(lines: bool, account: &Account) -> Self {
        Self {
            lines,
            length: 0,
            longest: 0,
            weight: Weight::default(),
            charge: account.charge(),
        }
    }

    fn add(&mut self, data: &[u8]) -> Result<(), OverBudget> {
        for byte in data {
            if self.lines && *byte == b'\n' {
                self.length = 0;
                self.weight = Weight::default();
                continue;
            }
            self.length += 1;
            self.weight.add(*byte);
            self.longest = self.longest.max(self.length);
            let over = if self.length > MAX_ANSWER && self.lines {
                OverBudget::Event(MAX_ANSWER)
            } else if self.length > MAX_ANSWER {
                OverBudget::Answer(MAX_ANSWER)
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

/// A body that ends in [`OverBudget`] when it is too long or too expensive to parse.
#[derive(Debug)]
pub struct Bounded<B> {
    inner: B,
    /// `None` = it was refused; nothing more of it is read.
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

/// Bounds all answers of a service.
#[derive(Debug, Clone)]
pub struct BoundLayer(Account);

impl BoundLayer {
    /// Charges what is being read to `account`.
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

/// A service whose answers are bounded.
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
        let watch = query.split('&').any(|word| word == "watch=true");
        let (account, answer) = (self.account.clone(), self.inner.call(request));
        Box::pin(async move {
            let answer = answer.await?;
            let meter = Meter::new(watch && answer.status().is_success(), &account);
            Ok(answer.map(|inner| Bounded {
                inner,
                meter: Some(meter),
            }))
        })
    }
}

/// The exceeded budget among the causes of an error, however deep.
#[must_use]
pub fn over_budget(error: &(dyn std::error::Error + 'static)) -> Option<OverBudget> {
    crate::cause(error)
}

#[cfg(test)]
mod tests;
