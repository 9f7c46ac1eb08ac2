//! Splits shell text into commands and words. Supports quotes, comments, continued lines, pipes, lists, loops and here-documents.
//! Substitutions are not expanded, and redirections are words. An unquoted `;`, `&` or `|` ends the command, even inside a
//! substitution or a redirection.

use super::Block;

/// The commands of a block: of `sh` every command, of `console` only lines with a prompt, of another language none.
pub(super) fn commands(block: &Block) -> Vec<Vec<String>> {
    match &*block.language {
        "sh" => split(&block.text),
        "console" => block
            .text
            .lines()
            .filter_map(|line| line.strip_prefix("$ "))
            .flat_map(split)
            .collect(),
        _ => Vec::new(),
    }
}

/// The commands of a script.
pub(super) fn split(script: &str) -> Vec<Vec<String>> {
    let script = without_here_documents(script);
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut letters = script.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\'' | '"' => quoted(letter, &mut letters, word.get_or_insert_default()),
            '\\' if letters.next_if_eq(&'\n').is_some() => {}
            '\\' => word.get_or_insert_default().extend(letters.next()),
            '#' if word.is_none() => while letters.next_if(|letter| *letter != '\n').is_some() {},
            ';' | '&' | '|' | '\n' => {
                commands.last_mut().expect("never empty").extend(word.take());
                commands.push(Vec::new());
            }
            ' ' | '\t' => commands.last_mut().expect("never empty").extend(word.take()),
            _ => word.get_or_insert_default().push(letter),
        }
    }
    commands.last_mut().expect("never empty").extend(word);
    commands.iter_mut().for_each(drop_keywords);
    commands.retain(|command| !command.is_empty());
    commands
}

/// Appends the text before the closing quote to `word`. In double quotes, a backslash escapes the characters of `$"\`.
fn quoted(quote: char, letters: &mut std::iter::Peekable<std::str::Chars<'_>>, word: &mut String) {
    while let Some(letter) = letters.next() {
        match letter {
            _ if letter == quote => return,
            '\\' if quote == '"' && letters.peek().is_some_and(|next| "$\"\\".contains(*next)) => {
                word.extend(letters.next())
            }
            _ => word.push(letter),
        }
    }
}

fn without_here_documents(script: &str) -> String {
    let mut kept = String::new();
    let mut lines = script.lines();
    while let Some(line) = lines.next() {
        kept.push_str(line);
        kept.push('\n');
        let end = line
            .split_once("<<")
            .and_then(|(_, rest)| rest.split_whitespace().next());
        if let Some(end) = end {
            lines.by_ref().take_while(|line| *line != end).for_each(drop);
        }
    }
    kept
}

/// Removes the words before the program's name: keywords, variable assignments and `sudo`. `for c in x`
/// has no program and stays.
fn drop_keywords(command: &mut Vec<String>) {
    let is_variable = |word: &str| {
        word.split_once('=').is_some_and(|(name, _)| {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        })
    };
    let is_program =
        |word: &String| !(["do", "then", "done", "{", "}", "sudo"].contains(&&**word) || is_variable(word));
    let program = command.iter().position(is_program).unwrap_or(command.len());
    command.drain(..program);
}

#[test]
fn script_is_split_into_commands_and_words() {
    let script = "# a comment\nfor c in x; do\n  a --b 'c d' \\\n    e\"f $g\" # end\ndone\nA=1 b <<E  # text\nc d\nE\ncat x | y && z\\ 1\n";
    let commands = split(script);
    let commands: Vec<Vec<&str>> = commands
        .iter()
        .map(|words| words.iter().map(|word| &**word).collect())
        .collect();
    assert_eq!(
        commands,
        [
            vec!["for", "c", "in", "x"],
            vec!["a", "--b", "c d", "ef $g"],
            vec!["b", "<<E"],
            vec!["cat", "x"],
            vec!["y"],
            vec!["z 1"],
        ]
    );
}
