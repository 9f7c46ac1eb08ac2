//! What a failed request is called where members' users can read it. The words never tell a refused port from a silent
//! one, or one certificate error from another: a kubeconfig is hostile input, and the hub must not be its port scanner.

use kube::Error;

/// Whatever happens below HTTP.
pub(crate) const SILENT: &str = "its API server does not answer";

/// The failure in words that are safe to show.
pub(crate) fn words(error: &Error) -> String {
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
