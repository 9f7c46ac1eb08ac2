//! Classifies failed requests and describes them to users.
//!
//! The description is the same for a closed port, a timeout and any certificate error. A kubeconfig is hostile input, and with a
//! more precise description its author could use the controller as a port scanner.

use clustermesh_access::{bounds::over_budget, cause, kubeconfig::Refused};
use kube::Error;

use crate::election::NotPermitted;

/// The description of a failure without an HTTP response. Three causes have descriptions of their own: an exceeded memory
/// limit, a refused kubeconfig, and a write that the election does not permit.
pub(crate) const NO_ANSWER: &str = "its API server does not answer";

/// Makes text from a member safe to log and to show: one line, printable characters, at most 200 bytes.
pub(crate) fn sanitize(text: &str) -> String {
    const MAX: usize = 200;
    let mut sanitized = String::new();
    for character in text.chars() {
        // `escape_debug` also escapes characters that reorder text on a terminal.
        let escaped = if character == '"' || character == '\'' {
            character.to_string()
        } else {
            character.escape_debug().to_string()
        };
        if sanitized.len() + escaped.len() > MAX - '…'.len_utf8() {
            sanitized.push('…');
            break;
        }
        sanitized.push_str(&escaped);
    }
    sanitized
}

/// Describes a failure. The description contains no text from the API server.
pub(crate) fn describe(error: &Error) -> String {
    if let Some(over) = over_budget(error) {
        return over.to_string();
    }
    if let Some(refused) = cause::<Refused>(error) {
        return refused.to_string();
    }
    if let Some(not_permitted) = cause::<NotPermitted>(error) {
        return not_permitted.to_string();
    }
    match error {
        Error::Api(status) => match status.code {
            401 => "its API server refuses the credentials (401): renew the kubeconfig in the Secret".to_owned(),
            403 => "its API server denies the account a permission (403): apply the member's RBAC manifests".to_owned(),
            429 => "its API server asks to slow down (429)".to_owned(),
            code @ 500.. => format!("its API server fails ({code})"),
            code => format!("its API server answers with an unexpected status ({code})"),
        },
        Error::SerdeError(_) | Error::FromUtf8(_) | Error::LinesCodecMaxLineLengthExceeded => {
            "its API server answers something that is not Kubernetes".to_owned()
        }
        _ => NO_ANSWER.to_owned(),
    }
}

/// Whether the API server responded. The codes 502 to 504 do not count: a proxy sends them when the API server is down.
pub(crate) fn is_answer(error: &Error) -> bool {
    match error {
        Error::Api(status) => !matches!(status.code, 502..=504),
        Error::SerdeError(_) | Error::FromUtf8(_) => true,
        _ => over_budget(error).is_some(),
    }
}

/// Whether requests for other objects of the cluster would fail for the same reason. Then the caller must wait before it sends more.
///
/// The statuses 401, 429 and 502 to 504 concern the whole cluster. Any other status, or a response that does not parse, may
/// concern only one object (a permission, a webhook, a field of another version), and must not delay requests for other objects.
pub(crate) fn is_cluster_wide(error: &Error) -> bool {
    match error {
        Error::Api(status) => matches!(status.code, 401 | 429 | 502..=504),
        Error::SerdeError(_) | Error::FromUtf8(_) => false,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    fn answer(code: u16) -> Error {
        Error::Api(Box::new(Status {
            code,
            message: "secret detail".into(),
            ..Status::default()
        }))
    }

    // threat: error-oracle
    #[test]
    fn description_hides_network_errors_and_server_messages() {
        let refused = Error::Service(Box::new(std::io::Error::from(std::io::ErrorKind::ConnectionRefused)));
        let reset = Error::Service(Box::new(std::io::Error::from(std::io::ErrorKind::ConnectionReset)));
        assert_eq!(
            (describe(&refused), describe(&reset)),
            (NO_ANSWER.to_owned(), NO_ANSWER.to_owned())
        );
        for code in [401, 403, 418, 429, 500, 503] {
            assert!(!describe(&answer(code)).contains("secret"), "{code}");
        }
    }

    // threat: log-injection
    #[test]
    fn sanitized_text_is_short_and_on_one_line() {
        assert_eq!(
            sanitize("line\nline\r\u{1b}[31m\u{202e} \"ä\""),
            "line\\nline\\r\\u{1b}[31m\\u{202e} \"ä\""
        );
        assert_eq!(sanitize(&"x".repeat(197)), "x".repeat(197));
        for long in ["x", "ä", "\n", "\u{202e}"] {
            let text = sanitize(&long.repeat(1_000_000));
            assert!((190..=200).contains(&text.len()) && text.ends_with('…'), "{text}");
        }
    }

    #[test]
    fn errors_of_one_object_and_of_the_cluster_are_told_apart() {
        assert!(!is_cluster_wide(&answer(422)) && !is_cluster_wide(&answer(409)) && !is_cluster_wide(&answer(403)));
        for code in [401, 429, 502, 503, 504] {
            assert!(is_cluster_wide(&answer(code)), "{code}");
        }
        assert!(!is_cluster_wide(&answer(500)));
        let unreadable = serde_json::from_str::<u8>("x").expect_err("no number");
        assert!(!is_cluster_wide(&Error::SerdeError(unreadable)));
    }
}
