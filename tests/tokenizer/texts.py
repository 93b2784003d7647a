"""A hundred texts that tokenizers get wrong: scripts, marks, emoji, whitespace, numbers, code."""

from __future__ import annotations

from typing import Final

SCRIPTS: Final = [
    "What is the capital of France?",
    "Où est la bibliothèque ? C'est l'été, n'est-ce pas…",
    "Die Größe der Straße überrascht Ärzte und Öffentlichkeit.",
    "¿Cómo estás? ¡Mañana será otro día, señor Núñez!",
    "Zażółć gęślą jaźń, proszę pana.",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Þetta er íslenska: ævintýri, óðinn, sjö.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Щедрий Ґудзик їде до Києва з п'ятьма книжками.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "שלום עולם, מה שלומך היום?",
    "בְּרֵאשִׁית בָּרָא אֱלֹהִים אֵת הַשָּׁמַיִם",
    "مرحبا بالعالم، كيف حالك؟ الساعة ٣:٤٥",
    "گچ پژ فارسی با نیم‌فاصله می‌نویسم",
    "यह हिन्दी है, क्या आप समझते हैं? १२३",
    "ক্ষুদ্র বাংলা বাক্য, দাম ৳১,২৩৪",
    "தமிழ் மொழி மிகவும் பழமையானது.",
    "ภาษาไทยไม่มีเว้นวรรคระหว่างคำ ราคา ๑๒๓ บาท",
    "ប្រទេសកម្ពុជា",
    "日本語の文章です。カタカナとひらがな、漢字が混在します。",
    "ﾊﾝｶｸｶﾀｶﾅ と ＦＵＬＬ　ＷＩＤＴＨ",
    "中文句子，没有空格。价格是１２３元。",
    "繁體中文與標點符號：「你好」、《書名》……",
    "한국어 문장입니다. 띄어쓰기가 있습니다.",
    "\u1112\u1161\u11ab\u1100\u1173\u11af in separate jamo",
    "ქართული ენა ლამაზია",
    "Հայերեն լեզու",
    "አማርኛ ቋንቋ ነው።",
    "ᚠᛇᚻ᛫ᛒᛦᚦ᛫ᚠᚱᚩᚠᚢᚱ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝕞𝕒𝕥𝕙 𝒍𝒆𝒕𝒕𝒆𝒓𝒔 and 𐍈𐌰𐌹",
]

MARKS: Final = [
    "caf\u00e9 and cafe\u0301 look the same",
    "e\u0301\u0302\u0303\u0304 stacked",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!",
    "ﬁ ligature, ² superscript, ½ fraction, Ⅷ roman, ① circled",
    "soft\u00adhyphen, zero\u200bwidth, non\u00a0breaking, word\u2060joiner",
    "\u202bRTL embedding\u202c and \u200eLTR\u200f marks",
    "English ثم العربية then עברית mixed",
    "\ufeffbyte order mark first",
    "replacement \ufffd character and \ufffe noncharacter",
    "private \ue000 use \U000f0000 \U0010fffd",
]

EMOJI: Final = [
    "👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈",
    "🇫🇷🇩🇪🇯🇵 flags in a row",
    "Family: 👨‍👨‍👦‍👦, judge: 👩🏿‍⚖️, heart: ❤️ vs ❤",
    "text😀text😀😀😀text",
    "1️⃣2️⃣3️⃣ keycaps #️⃣ *️⃣",
    "🫠🪿🫨 new ones",
    "Emoji at the end 🎉",
    "🎉",
    "㊗️ ™️ ©️ ‼️",
    "( ͡° ͜ʖ ͡°) ¯\\_(ツ)_/¯ ಠ_ಠ",
]

WHITESPACE: Final = [
    " leading space",
    "trailing space ",
    "  two  spaces   three    four",
    "\ttab\t\ttabs",
    "\n\nnewlines\n\n\nmore\n",
    "line one\r\nline two\r\n\r\nline four",
    "old\rmac\rlines",
    "   \n  \n \n",
    "a\u3000ideographic\u3000space\u2003em\u2009thin",
    "vertical\x0btab form\x0cfeed",
    "x \n y \n\n z  \n",
    " ",
    "\n",
    "spaces before newline   \nand after\n   here",
    "a" + " " * 40 + "b",
    "nbsp\u00a0\u00a0\u00a0end\u0085next\u2028line\u2029paragraph",
]

NUMBERS: Final = [
    "Steps:\n\n1. First\n2. Second\n3. Third\n",
    "List:\n- one\n- two\n  - nested\n    1. deep\n    2. deeper\n",
    "10. Ten\n11. Eleven\n100. Hundred\n",
    "* star\n+ plus\n- minus\n\n1) paren\n(a) letter",
    "3.14159265358979323846264338327950288419716939937510",
    "1234567890123456789012345678901234567890",
    "1,234,567.89 and 1.234.567,89 and 1 234 567",
    "2024-02-29T23:59:60Z, 12:34, 1/2, 50%, $3.50, €20",
    "0x1F4A9 0b1010 1e-10 -273.15 +49 (0)30 123456",
    "x1y2z3 v1.2.3-rc.4 H2O CO₂ m³ 10⁻⁶",
    "٠١٢٣٤٥٦٧٨٩ ०१२३ ௧௨௩ 一二三 ⅣⅫ",
    "192.168.0.1 and 2001:0db8:85a3::8a2e:0370:7334",
]

CODE: Final = [
    "def f(x):\n    return x ** 2  # square\n\nprint(f(3))\n",
    "for (int i = 0; i < n; ++i) {\n\ta[i] = b[i] << 2;\n}\n",
    '{"key": [1, 2, {"nested": null}], "s": "a\\nb"}',
    '<div class="a">&nbsp;<b>bold</b></div><!-- comment -->',
    "SELECT * FROM t WHERE a='x' AND b<>\"y\";",
    "```python\nimport os\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |",
    "\\frac{a}{b} + \\sum_{i=1}^{n} x_i^2 \\leq \\epsilon",
    "https://example.com/a/b?c=d&e=%20f#g user@example.org",
    "C:\\Users\\name\\file.txt ~/.bashrc $HOME/${x:-y}",
    "#!/bin/sh\nset -eu; echo \"$@\" | sed 's/a/b/g' > /dev/null 2>&1\n",
    "camelCase snake_case SCREAMING_SNAKE kebab-case PascalCaseHTTPServer",
    "a->b a::b a.b a?.b a!=b a===b a|>b a<=>b @a #b",
]

CONTRACTIONS: Final = [
    "I'm you're he's we've they'll I'd don't can't won't",
    "I'M YOU'RE HE'S WE'VE THEY'LL I'D DON'T",
    "‘curly’ “quotes” it’s o’clock rock ’n’ roll",
    "'s 't 're 've 'm 'll 'd '",
    "Mr. O'Neil's dog's toys'",
    "wait... what?! no—way… – really;yes:no",
    "((nested) [brackets] {curly} <angle>) \"'`",
    "!!!???...,,,;;;:::---___===+++",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
]

TEXTS: Final = SCRIPTS + MARKS + EMOJI + WHITESPACE + NUMBERS + CODE + CONTRACTIONS
