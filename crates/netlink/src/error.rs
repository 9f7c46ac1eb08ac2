//! The errors of netlink requests.

use std::io;

use netlink_packet_core::DecodeError;
use rustix::io::Errno;

use crate::socket::{ATTEMPTS, TIMEOUT};

/// Why a request failed. The message does not name the object; the caller adds it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket could not be opened, or its filter or multicast groups could not be set.
    #[error("cannot open a netlink socket: {0}; does a seccomp profile forbid AF_NETLINK?")]
    Open(#[source] io::Error),
    /// The socket failed.
    #[error("the netlink socket failed: {0}; open another one")]
    Socket(#[source] io::Error),
    /// The kernel refused the request.
    #[error("{errno}{}", reason(message.as_deref()))]
    Kernel {
        /// The error code.
        errno: Errno,
        /// The kernel's reason (extended acknowledgement), if it gives one.
        message: Option<String>,
    },
    /// The kernel sent no answer.
    #[error("the kernel did not answer within {} s; try again", TIMEOUT.as_secs())]
    NoAnswer,
    /// The objects changed during every attempt to dump them.
    #[error("the objects changed during each of {ATTEMPTS} attempts to read them all; try again")]
    Interrupted,
    /// An answer could not be parsed.
    #[error("the kernel's answer cannot be parsed: {0}; if the kernel is newer than this program, update the program")]
    Malformed(DecodeError),
}

fn reason(message: Option<&str>) -> String {
    message.map(|message| format!(": {message}")).unwrap_or_default()
}

impl Error {
    /// The kernel's error code; `None` = another kind of error.
    #[must_use]
    pub const fn errno(&self) -> Option<Errno> {
        match self {
            Self::Kernel { errno, .. } => Some(*errno),
            _ => None,
        }
    }
}

impl From<DecodeError> for Error {
    fn from(error: DecodeError) -> Self {
        Self::Malformed(error)
    }
}

/// [`Error::Open`] and [`Error::Socket`] become their source; the other variants keep their message. Of the others, only a kernel error
/// without a reason has a `raw_os_error`.
impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Open(source) | Error::Socket(source) => source,
            Error::Kernel { errno, message: None } => errno.into(),
            Error::Kernel { errno, .. } => Self::new(Self::from(errno).kind(), error),
            Error::NoAnswer => Self::new(io::ErrorKind::TimedOut, error),
            Error::Interrupted => Self::new(io::ErrorKind::Interrupted, error),
            Error::Malformed(_) => Self::new(io::ErrorKind::InvalidData, error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_error_shows_code_and_reason() {
        let bare = Error::Kernel {
            errno: Errno::EXIST,
            message: None,
        };
        assert_eq!(bare.to_string(), "File exists (os error 17)");
        assert_eq!(io::Error::from(bare).raw_os_error(), Some(17));
        let explained = Error::Kernel {
            errno: Errno::INVAL,
            message: Some("Invalid prefix for given prefix length".to_owned()),
        };
        let text = "Invalid argument (os error 22): Invalid prefix for given prefix length";
        assert_eq!(explained.to_string(), text);
        let converted = io::Error::from(explained);
        assert_eq!(
            (converted.kind(), converted.to_string()),
            (io::ErrorKind::InvalidInput, text.to_owned())
        );
    }
}
