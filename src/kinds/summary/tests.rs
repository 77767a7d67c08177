use std::time::Duration;

use super::*;
use rustix::time::{ClockId, clock_gettime};

use sentences::{count_words, cut, split};

fn summary(text: &str, max_words: usize) -> Summary {
    summarize(text, max_words, &Stop::never()).unwrap()
}

const STORY: &str = "The city council approved a new budget for public transport on Monday. The weather was mild. \
    The budget adds 3.14 million euros for buses and trams, Dr. Weber said. Many residents had asked the council for \
    more buses. A dog barked outside the hall. The council expects the new buses to arrive in spring. Public transport \
    in the city carried 40 million passengers last year. Lunch was served at noon, e.g. soup and bread.";

#[test]
fn sentences_end_where_their_language_ends_them() {
    for (text, expected) in [
        ("One. Two! Three?", vec!["One.", "Two!", "Three?"]),
        ("Pi is 3.14 today. Yes.", vec!["Pi is 3.14 today.", "Yes."]),
        ("Fruit, e.g. apples, is good. Eat.", vec!["Fruit, e.g. apples, is good.", "Eat."]),
        ("Use tools, e.g. Rust, daily. Fine.", vec!["Use tools, e.g. Rust, daily.", "Fine."]),
        ("Dr. Smith met J. R. Brown. They spoke.", vec!["Dr. Smith met J. R. Brown.", "They spoke."]),
        ("He lives in the U.S. The house is big.", vec!["He lives in the U.S.", "The house is big."]),
        ("The U.S. Senate voted. It passed.", vec!["The U.S. Senate voted.", "It passed."]),
        ("See Fig. 3 and No. 5 here. Done.", vec!["See Fig. 3 and No. 5 here.", "Done."]),
        (
            "He said \"Stop!\" and left. She \"stayed.\" Why?",
            vec!["He said \"Stop!\" and left.", "She \"stayed.\"", "Why?"],
        ),
        ("\"Go!\" she said. They went.", vec!["\"Go!\" she said.", "They went."]),
        ("Wait... what? No.", vec!["Wait... what?", "No."]),
        ("1. First thing. 2. Second thing.", vec!["1. First thing.", "2. Second thing."]),
        ("- First point\n- Second point\n- Third point", vec!["- First point", "- Second point", "- Third point"]),
        ("A Heading\nThe text begins here.", vec!["A Heading", "The text begins here."]),
        ("A first paragraph\n\nA second one", vec!["A first paragraph", "A second one"]),
        (
            "This line was wrapped because it was far too long to fit\nInto a terminal.",
            vec!["This line was wrapped because it was far too long to fit Into a terminal."],
        ),
        ("第一文です。第二文です！第三文です？", vec!["第一文です。", "第二文です！", "第三文です？"]),
        ("هذه جملة أولى؟ وهذه ثانية۔ وثالثة.", vec!["هذه جملة أولى؟", "وهذه ثانية۔", "وثالثة."]),
        ("यह पहला वाक्य है। यह दूसरा है।", vec!["यह पहला वाक्य है।", "यह दूसरा है।"]),
        ("no end at all", vec!["no end at all"]),
    ] {
        assert_eq!(split(text), expected, "{text}");
    }
}

#[test]
fn nothing_but_white_space_is_lost_by_splitting() {
    let squeezed = |text: &str| text.split_whitespace().collect::<String>();
    for text in [
        STORY,
        "第一文です。第二文です！",
        "\u{feff}a.\r\nb.\u{2029}c\u{85}d",
        "\"(!?).\" … ‽ 。。。",
        "\u{1F469}\u{200D}\u{1F467}",
    ] {
        assert_eq!(squeezed(&split(text).concat()), squeezed(text));
    }
}

#[test]
fn words_are_counted_and_cut_by_unicode() {
    assert_eq!(count_words("It's 3.14, isn't it?"), 4);
    assert_eq!(count_words("\u{1F469}\u{200D}\u{1F469}\u{200D}\u{1F467} \u{1F600}"), 2);
    assert_eq!(cut("one two, three four", 2), "one two");
    assert_eq!(cut("one two", 5), "one two");
    assert_eq!(cut("!! ??", 3), "!! ?");
    assert_eq!(cut(&"e\u{301}".repeat(300), 1).len(), 900);
}

#[test]
fn a_summary_is_whole_sentences_in_their_order_and_within_the_limit() {
    let all = split(STORY);
    assert_eq!(all.len(), 8);
    for max_words in 1..=110 {
        let Summary { text, sentences, words, truncated } = summary(STORY, max_words);
        assert!(!text.is_empty() && words <= max_words && count_words(&text) == words, "{max_words}");
        if !truncated {
            let places: Vec<usize> =
                all.iter().enumerate().filter(|(_, s)| text.contains(*s)).map(|(i, _)| i).collect();
            assert_eq!(places.len(), sentences);
            assert_eq!(places.iter().map(|i| all[*i].clone()).collect::<Vec<_>>().join(" "), text);
        }
    }
}

#[test]
fn what_the_text_is_about_is_kept_and_what_it_mentions_by_the_way_is_not() {
    let text = summary(STORY, 40).text;
    assert!(text.contains("budget") && text.contains("council"), "{text}");
    assert!(!text.contains("dog") && !text.contains("weather"), "{text}");
}

#[test]
fn a_thing_said_twice_is_taken_once() {
    let text = "The bridge over the river was closed by the city on Friday. Engineers found cracks in its pillars. \
        The bridge over the river was closed by the city on Friday. Trains are running again between the two towns.";
    let Summary { text, .. } = summary(text, 22);
    assert_eq!(text.matches("was closed").count(), 1, "{text}");
}

#[test]
fn a_text_within_the_limit_comes_back_whole() {
    let text = "第一文です。第二文です！";
    assert_eq!(
        summary(text, 100),
        Summary { text: text.into(), sentences: 2, words: count_words(text), truncated: false }
    );
}

#[test]
fn when_no_sentence_fits_the_best_is_cut_at_a_word_and_marked() {
    let result = summary("The quick brown fox jumps over the lazy dog and runs away.", 4);
    assert_eq!(result, Summary { text: "The quick brown fox…".into(), sentences: 1, words: 4, truncated: true });
    let emoji = summary(&"\u{1F600}".repeat(1000), 5);
    assert_eq!((emoji.words, emoji.truncated), (5, true));
}

#[test]
fn texts_without_spaces_between_sentences_are_shortened_to_whole_ones() {
    for text in [
        "第一文です。第二文です！第三文です？".repeat(20),
        "هذه جملة أولى؟ وهذه ثانية۔ ".repeat(20),
        "यह पहला वाक्य है। यह दूसरा है। ".repeat(20),
    ] {
        let result = summary(&text, 12);
        assert!(result.sentences >= 2 && !result.truncated && result.text.len() < text.len() / 4, "{result:?}");
    }
}

#[test]
fn the_same_text_has_the_same_summary() {
    assert_eq!(summary(STORY, 30), summary(STORY, 30));
}

#[test]
fn a_stopped_job_ends_between_two_steps() {
    let token = tokio_util::sync::CancellationToken::new();
    token.cancel();
    let failure = summarize(STORY, 10, &Stop::told_by(token)).unwrap_err();
    assert_eq!(failure.cause(), crate::kinds::FailureCause::Cancelled);
}

#[test]
fn a_blank_text_and_a_limit_of_none_are_refused() {
    for (payload, field) in [
        (json!({"text": " \n"}), "text"),
        (json!({"text": "a", "max_words": 0}), "max_words"),
        (json!({"text": 1}), "text"),
    ] {
        assert_eq!(validate(&payload).unwrap_err().field, field);
    }
}

#[test]
fn a_text_of_300_kib_takes_less_than_2_seconds_of_a_core_whatever_its_shape() {
    let varied: String =
        (0..50_000_u64).map(|n| format!("w{}{}", n * n * 7919 % 4999, if n % 20 == 0 { ". W" } else { " " })).collect();
    let bracketed = "(".repeat(150_000) + &"B. ".repeat(50_000);
    let closed = "a.".to_owned() + &")".repeat(300_000);
    let marked = "a.".to_owned() + &")\u{93e}".repeat(80_000);
    let spaceless = "A.文.".repeat(60_000);
    let numbers = "a.) 1 ".repeat(50_000);
    for text in [
        varied,
        "word ".repeat(60_000),
        "a. B! ".repeat(50_000),
        "文。".repeat(50_000),
        bracketed,
        spaceless,
        numbers,
        closed,
        marked,
    ] {
        // The thread's own time: how busy the machine is with other tests is not the summary's doing.
        let used = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).expect("not negative");
        let before = used();
        summary(&text, 100);
        let taken = used() - before;
        assert!(taken < Duration::from_secs(2), "{taken:?}");
    }
}
