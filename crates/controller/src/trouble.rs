//! What a failed request is called where members' users can read it. The words never tell a refused port from a silent
//! one, or one certificate error from another: a kubeconfig is hostile input, and the hub must not be its port scanner.

use clustermesh_access::{bounds::over_budget, cause, kubeconfig::Refused};
use kube::Error;

/// Whatever happens below HTTP.
pub(crate) const SILENT: &str = "its API server does not answer";

/// What a member says, as it may be logged or shown: on one line, in printable characters, and not much of it.
pub(crate) fn quoted(text: &str) -> String {
    const MAX: usize = 200;
    let mut quoted = String::new();
    for character in text.chars() {
        // `escape_debug` also takes care of what reorders text on a terminal.
        let escaped = if character == '"' || character == '\'' {
            character.to_string()
        } else {
            character.escape_debug().to_string()
        };
        if quoted.len() + escaped.len() > MAX - '…'.len_utf8() {
            quoted.push('…');
            break;
        }
        quoted.push_str(&escaped);
    }
    quoted
}

/// The failure in words that are safe to show.
pub(crate) fn words(error: &Error) -> String {
    if let Some(over) = over_budget(error) {
        return over.to_string();
    }
    if let Some(refused) = cause::<Refused>(error) {
        return refused.to_string();
    }
    match error {
        Error::Api(status) => match status.code {
            401 => "its API server refuses the credentials (401): renew the kubeconfig in the Secret".to_owned(),
            403 => "its API server forbids what the account needs (403): apply the member's RBAC manifests".to_owned(),
            429 => "its API server asks to slow down (429)".to_owned(),
            code @ 500.. => format!("its API server fails ({code})"),
            code => format!("its API server answers with an unexpected status ({code})"),
        },
        Error::SerdeError(_) | Error::FromUtf8(_) | Error::LinesCodecMaxLineLengthExceeded => {
            "its API server answers something that is not Kubernetes".to_owned()
        }
        _ => SILENT.to_owned(),
    }
}

/// Whether an API server answered, whatever it said. What a proxy says when nothing is behind it (502 to 504) is no answer.
pub(crate) fn answered(error: &Error) -> bool {
    match error {
        Error::Api(status) => !matches!(status.code, 502..=504),
        Error::SerdeError(_) | Error::FromUtf8(_) => true,
        _ => over_budget(error).is_some(),
    }
}

/// Whether the whole cluster is in trouble, not one object: waiting helps, other objects would fail alike. A 500 and an
/// answer that does not parse may be of one object (a webhook, a field of another version): it must not hold up the others.
pub(crate) fn is_of_the_cluster(error: &Error) -> bool {
    match error {
        Error::Api(status) => matches!(status.code, 401 | 429 | 502..=504),
        Error::SerdeError(_) => false,
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

    #[test]
    fn what_lies_below_http_has_one_word_and_no_answer_is_repeated() {
        let refused = Error::Service(Box::new(std::io::Error::from(std::io::ErrorKind::ConnectionRefused)));
        let reset = Error::Service(Box::new(std::io::Error::from(std::io::ErrorKind::ConnectionReset)));
        assert_eq!((words(&refused), words(&reset)), (SILENT.to_owned(), SILENT.to_owned()));
        for code in [401, 403, 418, 429, 500, 503] {
            assert!(!words(&answer(code)).contains("secret"), "{code}");
        }
    }

    #[test]
    fn quoted_text_is_short_and_on_one_line() {
        assert_eq!(
            quoted("line\nline\r\u{1b}[31m\u{202e} \"ä\""),
            "line\\nline\\r\\u{1b}[31m\\u{202e} \"ä\""
        );
        assert_eq!(quoted(&"x".repeat(197)), "x".repeat(197));
        for long in ["x", "ä", "\n", "\u{202e}"] {
            let quoted = quoted(&long.repeat(1_000_000));
            assert!((190..=200).contains(&quoted.len()) && quoted.ends_with('…'), "{quoted}");
        }
    }

    #[test]
    fn one_refused_object_is_no_trouble_of_the_cluster() {
        assert!(
            !is_of_the_cluster(&answer(422)) && !is_of_the_cluster(&answer(409)) && !is_of_the_cluster(&answer(403))
        );
        for code in [401, 429, 502, 503, 504] {
            assert!(is_of_the_cluster(&answer(code)), "{code}");
        }
        assert!(!is_of_the_cluster(&answer(500)));
        let unreadable = serde_json::from_str::<u8>("x").expect_err("no number");
        assert!(!is_of_the_cluster(&Error::SerdeError(unreadable)));
    }
}
