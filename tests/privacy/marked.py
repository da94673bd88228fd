"""A made set of marked strings in five languages, from a fixed seed: values with valid check digits; hard negatives.

python tests/privacy/marked.py      # recall and precision of each kind, as the table in the README
"""

from __future__ import annotations

import base64
import json
import random
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from stdnum import iban, luhn
from stdnum.cn import ric
from stdnum.fr import nir
from stdnum.iso7064 import mod_11_10
from stdnum.it import codicefiscale

SEED, EACH = 20, 44
"""The seed, and marked strings of each kind."""


@dataclass(frozen=True)
class Marked:
    """A text with the values in it: (kind, value); of a hard negative there is none."""

    text: str
    values: tuple[tuple[str, str], ...]
    language: str


# Sentences with a place for a value, none of them written for a pattern; %s is the value.
SENTENCES: dict[str, dict[str, list[str]]] = {
    "EMAIL": {
        "en": ["Please write to %s before Friday.", "Contact: %s, our support desk", "cc'd <%s> on the thread"],
        "zh": ["请发送邮件至%s,谢谢。", "我的邮箱是%s。"],
        "it": ["Scrivimi a %s, grazie!", "La mail (%s) non arriva."],
        "fr": ["Écrivez-moi à %s.", "Adresse électronique : %s"],
        "de": ["Schreiben Sie bitte an %s.", "E-Mail:%s"],
    },
    "PHONE": {
        "en": ["Call me on %s after six.", "Our office line is %s, ask for Kim.", "Tel. %s"],
        "zh": ["请拨打%s联系我们。", "我的手机号是%s,随时可以打。"],
        "it": ["Chiamami al %s quando puoi.", "Cellulare: %s"],
        "fr": ["Vous pouvez me joindre au %s.", "Téléphone : %s (bureau)"],
        "de": ["Sie erreichen mich unter %s.", "Meine Nummer ist %s."],
    },
    "IP": {
        "en": ["The request came from %s at noon.", "ssh root@host failed, try %s instead"],
        "zh": ["服务器地址为%s,端口八十。"], "it": ["Il server %s non risponde."],
        "fr": ["Connexion refusée par %s."], "de": ["Der Rechner mit der Adresse %s ist aus."],
    },
    "IBAN": {
        "en": ["Wire it to %s, please."], "zh": ["汇款账号:%s"], "it": ["Il bonifico va su %s entro domani."],
        "fr": ["Mon IBAN est le %s."], "de": ["Überweisen Sie auf das Konto %s."],
    },
    "CARD": {
        "en": ["Charge card %s, expiry 09/28.", "My Visa number: %s"], "zh": ["银行卡号%s已绑定。"],
        "it": ["La carta %s è scaduta."], "fr": ["La carte n° %s a été refusée."], "de": ["Kreditkarte %s belasten."],
    },
    "IT_FISCAL_CODE": {
        "en": ["Her Italian tax code is %s."], "zh": ["意大利税号:%s"],
        "it": ["Codice fiscale %s, nata a Roma.", "CF: %s", "Il sottoscritto (%s) dichiara"],
        "fr": ["Code fiscal italien : %s."], "de": ["Die italienische Steuernummer lautet %s."],
    },
    "FR_NIR": {
        "en": ["French social security number %s"], "zh": ["法国社保号码为%s。"], "it": ["Il numero francese è %s."],
        "fr": ["Mon numéro de sécurité sociale est %s.", "NIR : %s"], "de": ["Französische Versicherungsnummer: %s"],
    },
    "DE_TAX_ID": {
        "en": ["German tax ID %s, see attachment"], "zh": ["德国税号是%s。"], "it": ["Codice tedesco: %s"],
        "fr": ["Identifiant fiscal allemand %s."], "de": ["Meine Steuer-ID lautet %s.", "Steuernummer (IdNr): %s"],
    },
    "CN_ID": {
        "en": ["Resident ID %s was scanned."], "zh": ["身份证号码%s,请核对。", "居民身份证:%s"],
        "it": ["Documento cinese n. %s"], "fr": ["Carte d'identité chinoise : %s."], "de": ["Chinesischer Ausweis %s."],
    },
    "US_SSN": {
        "en": ["SSN %s on file.", "His social is %s."], "zh": ["社会安全号码:%s"], "it": ["Numero americano %s."],
        "fr": ["Numéro américain : %s."], "de": ["Die US-Nummer ist %s."],
    },
    "UK_NINO": {
        "en": ["National Insurance number %s", "My NI no is %s, thanks"], "zh": ["英国国民保险号:%s"],
        "it": ["Numero britannico %s."], "fr": ["Numéro britannique : %s."], "de": ["Britische Nummer %s."],
    },
    "SECRET": {
        "en": ["Set API_KEY=%s in the shell.", 'The config has "password": "%s" in clear.', "export DB_PASSWORD='%s'"],
        "zh": ["密码是:%s", "token = %s"], "it": ["La password è %s"], "fr": ["Le mot de passe : %s"],
        "de": ["Das Passwort: %s"],
    },
    "AWS_KEY": {one: ["aws_access_key_id = %s", "key %s"] for one in ("en", "zh", "it", "fr", "de")},
    "GITHUB_TOKEN": {one: ["git clone https://%s@host/repo", "token %s"] for one in ("en", "zh", "it", "fr", "de")},
    "JWT": {one: ["Authorization: Bearer %s", "jwt %s"] for one in ("en", "zh", "it", "fr", "de")},
    "PRIVATE_KEY": {one: ["%s", "id_rsa:\n%s\nend"] for one in ("en", "zh", "it", "fr", "de")},
}  # fmt: skip

# What looks like a value and is none.
NEGATIVES: dict[str, list[str]] = {
    "en": [
        "Version 10.2.33.4 of the driver is out.",
        "Order 4929123456789013 has shipped.",
        "Build 20240506123456 failed.",
        "ISBN 978-3-16-148410-0 is sold out.",
        "It costs 1,234,567.89 dollars in all.",
        "The ratio is 3.14159265358979.",
        "def check(password: str) -> bool:",
        "password = os.environ['DB_PASSWORD']",
        "Follow @anna_rossi on the network.",
        "user@localhost is no address of the net",
        "the token is <your-token-here>",
        "std::vector<int>::iterator it;",
        "Invoice no. 2024-0012345 is due.",
        "Tracking number 1Z999AA10123456784",
        "commit 9fceb02d0ae598e95dc970b74767f19372d61af8",
        "UUID 550e8400-e29b-41d4-a716-446655440000",
        "from 12:30:45 to 13:00:00",
        "SSN 000-12-3456 is a dummy",
        "MAC 00:1B:44:11:3A:B7 was seen",
        "the secret is patience",
        "passwords: never-share-them",
        "666-45-1234 is no number",
        "coordinates 41.902782, 12.496366",
        "1234-5678-9012-3456 is not a card",
        "Section 12.3.4.5.6 of the manual",
    ],
    "zh": [
        "订单号3301061990010100是错的。",
        "版本号1.2.3。",
        "密码太短了",
        "总价为12345678901元",
        "2024年05月06日12时30分",
        "会议在13:30:00开始",
        "编号110101199003078888有误",
        "请输入您的密码:********",
    ],
    "it": [
        "Ordine n. 3331234567 spedito.",
        "Il codice ABCDEF12G34H567I non esiste.",
        "Costa 1.234.567,89 euro.",
        "Partita 2024/000123456",
        "la password è segreta",
        "Art. 12, comma 3, lettera b)",
        "CAP 00184, Roma",
    ],
    "fr": [
        "Commande 0612345678 expédiée.",
        "Le numéro 1 85 05 78 006 084 00 est faux.",
        "Cela coûte 1 234 567,89 €.",
        "le mot de passe est obligatoire",
        "Article L. 123-4-5 du code",
        "Version 7.8.9.1 du logiciel",
    ],
    "de": [
        "Bestellung 12345678901 ist da.",
        "Rechnung 2024-05-000123",
        "Es kostet 1.234.567,89 Euro.",
        "Das Passwort ist zu kurz.",
        "Aktenzeichen 12 O 345/67",
        "Konto DE00 1234 5678 9012 3456 78 gibt es nicht.",
    ],
}

# Ways of writing values that people use more rarely, written down before any was tried: (kind, language, text, value).
UNUSUAL: list[tuple[str, str, str, str]] = [
    ("EMAIL", "de", "Mail an jörg.müller@example.de, bitte", "jörg.müller@example.de"),
    ("EMAIL", "de", "anna@bücher.example antwortet nicht", "anna@bücher.example"),
    ("EMAIL", "en", "reach me at anna (at) example (dot) org", "anna (at) example (dot) org"),
    ("EMAIL", "en", "from: ANNA.ROSSI@EXAMPLE.ORG", "ANNA.ROSSI@EXAMPLE.ORG"),
    ("PHONE", "it", "tel. +39.06.698.12345", "+39.06.698.12345"),
    ("PHONE", "en", "Dial +1 (415) 555-2671 ext. 12", "+1 (415) 555-2671"),
    ("PHONE", "de", "Telefon 0711 / 123 456-0", "0711 / 123 456-0"),
    ("PHONE", "en", "office +44 (0)20 7946 0018", "+44 (0)20 7946 0018"),
    ("PHONE", "zh", "手机１３８１２３４５６７８", "１３８１２３４５６７８"),
    ("PHONE", "fr", "0612345678, c'est mon portable", "0612345678"),
    ("IP", "en", "beacon to 203[.]0[.]113[.]7 blocked", "203[.]0[.]113[.]7"),
    ("IP", "en", "listening on ::1 only", "::1"),
    ("IP", "de", "erreichbar als fe80::1ff:fe23:4567:890a", "fe80::1ff:fe23:4567:890a"),
    ("IP", "en", "GET http://198.51.100.24/admin", "198.51.100.24"),
    ("IBAN", "de", "Konto DE89-3704-0044-0532-0130-00", "DE89-3704-0044-0532-0130-00"),
    ("IBAN", "de", "iban de89370400440532013000", "de89370400440532013000"),
    ("CARD", "en", "card 4111.1111.1111.1111", "4111.1111.1111.1111"),
    ("CARD", "fr", "carte 4111\u00a01111\u00a01111\u00a01111", "4111\u00a01111\u00a01111\u00a01111"),
    ("IT_FISCAL_CODE", "it", "cf rssmra85t10a562s", "rssmra85t10a562s"),
    ("IT_FISCAL_CODE", "it", "C.F. RSS MRA 85T10 A562S", "RSS MRA 85T10 A562S"),
    ("FR_NIR", "fr", "NIR 2.95.10.99.126.111.93", "2.95.10.99.126.111.93"),
    ("FR_NIR", "fr", "n° sécu 2951099126111/93", "2951099126111/93"),
    ("DE_TAX_ID", "de", "IdNr. 36/574/261/809", "36/574/261/809"),
    ("DE_TAX_ID", "de", "IdNr 36574261809", "36574261809"),
    ("CN_ID", "zh", "身份证 360426 19910101 0071", "360426 19910101 0071"),
    ("CN_ID", "zh", "身份证號碼:36042619910101007１", "36042619910101007１"),
    ("US_SSN", "en", "SSN 536 90 4399", "536 90 4399"),
    ("US_SSN", "en", "social security 536904399", "536904399"),
    ("UK_NINO", "en", "ni: ab123456c", "ab123456c"),
    ("UK_NINO", "en", "NINO AB-12-34-56-C", "AB-12-34-56-C"),
    ("SECRET", "en", "password: correct horse battery staple", "correct horse battery staple"),
    ("SECRET", "de", "PWD=Sommer2024!", "Sommer2024!"),
    ("SECRET", "en", "The token, q7Rt2LmZ91xKp0, was shared.", "q7Rt2LmZ91xKp0"),
    (
        "SECRET",
        "en",
        "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    ),
]

PHONES: dict[str, list[str]] = {
    "en": ["+1 415-555-2671", "(212) 736-5000", "+44 20 7946 0018", "020 7946 0991", "650-253-0000", "+14155552671"],
    "zh": ["+86 138 1234 5678", "13912345678", "010-62345678", "+8618612345678", "021 6234 5678"],
    "it": ["+39 347 123 4567", "3471234567", "06 698 12345", "+39 02 1234 5678", "0039 340 1234567"],
    "fr": ["+33 6 12 34 56 78", "06 12 34 56 78", "01 42 68 53 00", "0033 1 42 68 53 00", "06.12.34.56.78"],
    "de": ["+49 30 901820", "030 901820", "0151 23456789", "+49 (0)89 1234567", "0171/2345678"],
}


def digits(draw: random.Random, number: int) -> str:
    return "".join(draw.choice(string.digits) for _ in range(number))


def letters(draw: random.Random, number: int, of: str = string.ascii_letters + string.digits) -> str:
    return "".join(draw.choice(of) for _ in range(number))


def email(draw: random.Random) -> str:
    name = draw.choice(["anna.rossi", "li_wei88", "jean-paul.d", "m.mueller+list", "kim", "x9", "O'Neil"[2:]])
    host = draw.choice(["example.org", "mail.example.co.uk", "uni-x.de", "posta.it", "qq.com"])
    return f"{name}{draw.randrange(100)}@{host}"


def spaced(text: str, sizes: list[int]) -> str:
    parts = []
    for size in sizes:
        parts.append(text[:size])
        text = text[size:]
    return " ".join([*parts, text]).strip()


def iban_of(draw: random.Random) -> str:
    country, bban = draw.choice(
        [
            ("DE", digits(draw, 18)),
            ("FR", ""),
            ("IT", ""),
            ("GB", "NWBK" + digits(draw, 14)),
            ("NL", "ABNA" + digits(draw, 10)),
        ]
    )
    if country in ("FR", "IT"):  # these have check digits of their own inside; known good ones
        return draw.choice(["FR14 2004 1010 0505 0001 3M02 606", "IT60 X054 2811 1010 0000 0123 456"])
    whole = country + iban.calc_check_digits(f"{country}00{bban}") + bban
    return iban.format(whole) if draw.random() < 0.5 else whole


def card(draw: random.Random) -> str:
    first, length = draw.choice([("4", 16), ("51", 16), ("55", 16), ("34", 15), ("6011", 16), ("62", 16)])
    body = first + digits(draw, length - len(first) - 1)
    whole = body + luhn.calc_check_digit(body)
    return draw.choice([whole, spaced(whole, [4, 4, 4]), spaced(whole, [4, 4, 4]).replace(" ", "-")])


def fiscal_code(draw: random.Random) -> str:
    consonants, months = "BCDFGLMNPRSTVZ", "ABCDEHLMPRST"
    day = draw.randrange(1, 29) + draw.choice([0, 40])
    body = letters(draw, 6, consonants) + digits(draw, 2) + draw.choice(months) + f"{day:02d}" + draw.choice("AFGHL")
    body += digits(draw, 3)
    return body + codicefiscale.calc_check_digit(body)


def french(draw: random.Random) -> str:
    body = f"{draw.choice('12')}{digits(draw, 2)}{draw.randrange(1, 13):02d}{draw.randrange(1, 96):02d}"
    body += f"{draw.randrange(1, 900):03d}{draw.randrange(1, 900):03d}"
    whole = body + nir.calc_check_digits(body)
    return nir.format(whole) if draw.random() < 0.5 else whole


def german(draw: random.Random) -> str:
    order = draw.sample(string.digits, 9)
    body = [*order, draw.choice(order)]
    draw.shuffle(body)
    if body[0] == "0":
        body.reverse()
    if body[0] == "0":
        return german(draw)
    whole = "".join(body)
    whole += mod_11_10.calc_check_digit(whole)
    return spaced(whole, [2, 3, 3]) if draw.random() < 0.5 else whole


def chinese(draw: random.Random) -> str:
    place = draw.choice(["110101", "310104", "440106", "510104", "330106"])
    body = f"{place}{draw.randrange(1950, 2010)}{draw.randrange(1, 13):02d}{draw.randrange(1, 29):02d}{digits(draw, 3)}"
    return body + ric.calc_check_digit(body + "0")


def american(draw: random.Random) -> str:
    return f"{draw.randrange(100, 600)}-{draw.randrange(10, 99):02d}-{draw.randrange(1000, 9999)}"


def british(draw: random.Random) -> str:
    whole = draw.choice(["AB", "CE", "JG", "PR", "WZ"]) + digits(draw, 6) + draw.choice("ABCD")
    return spaced(whole, [2, 2, 2, 2]) if draw.random() < 0.5 else whole


def address(draw: random.Random) -> str:
    if draw.random() < 0.3:
        return ":".join(f"{draw.randrange(1, 65536):x}" for _ in range(8))
    return ".".join(str(draw.randrange(1, 255)) for _ in range(4))


def secret(draw: random.Random) -> str:
    while True:
        found = letters(draw, draw.randrange(14, 33))
        if any(one.isdigit() for one in found):
            return found


def token(draw: random.Random) -> str:
    parts = [json.dumps({"alg": "HS256", "typ": "JWT"}), json.dumps({"sub": digits(draw, 8), "name": "A"})]
    head, body = (base64.urlsafe_b64encode(part.encode()).decode().rstrip("=") for part in parts)
    return f"{head}.{body}.{letters(draw, 43)}"


def private_key(draw: random.Random) -> str:
    kind = draw.choice(["RSA ", "EC ", "OPENSSH ", ""])
    lines = "\n".join(letters(draw, 64) for _ in range(4))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{lines}\n-----END {kind}PRIVATE KEY-----"


MAKERS: dict[str, Callable[[random.Random], str]] = {
    "EMAIL": email, "IP": address, "IBAN": iban_of, "CARD": card, "IT_FISCAL_CODE": fiscal_code, "FR_NIR": french,
    "DE_TAX_ID": german, "CN_ID": chinese, "US_SSN": american, "UK_NINO": british, "SECRET": secret,
    "AWS_KEY": lambda draw: "AKIA" + letters(draw, 16, string.ascii_uppercase + "234567"),
    "GITHUB_TOKEN": lambda draw: draw.choice(["ghp_", "gho_", "ghs_"]) + letters(draw, 36),
    "JWT": token, "PRIVATE_KEY": private_key,
}  # fmt: skip


def marked() -> Iterator[Marked]:
    """The set: EACH texts of each kind, over the languages, and the hard negatives."""
    draw = random.Random(SEED)
    for kind, by_language in SENTENCES.items():
        for number in range(EACH):
            language = list(by_language)[number % len(by_language)]
            sentence = draw.choice(by_language[language])
            value = draw.choice(PHONES[language]) if kind == "PHONE" else MAKERS[kind](draw)
            yield Marked(sentence.replace("%s", value), ((kind, value),), language)
    for language, texts in NEGATIVES.items():
        for text in texts:
            yield Marked(text, (), language)


def unusual() -> Iterator[Marked]:
    """Values that are written in rarer ways."""
    for kind, language, text, value in UNUSUAL:
        yield Marked(text, ((kind, value),), language)


def measured(texts: Iterable[Marked]) -> dict[str, tuple[int, int, int]]:
    """For each kind: values in the texts, values found exactly, and all that was called this kind."""
    from luthier.privacy.find import find

    there: Counter[str] = Counter()
    right: Counter[str] = Counter()
    called: Counter[str] = Counter()
    for one in texts:
        found = [(span.kind, one.text[span.begin : span.end]) for span in find(one.text)]
        there.update(kind for kind, _ in one.values)
        called.update(kind for kind, _ in found)
        right.update(kind for kind, value in found if (kind, value) in one.values)
    return {kind: (there[kind], right[kind], called[kind]) for kind in sorted(there | called)}


def main() -> None:
    rare = measured(unusual())
    print("| kind | strings | recall | precision | rarer forms found |\n| --- | --- | --- | --- | --- |")
    for kind, (there, right, called) in measured(marked()).items():
        others = "{1} of {0}".format(*rare[kind]) if kind in rare else ""
        print(f"| `{kind}` | {there} | {right / max(1, there):.3f} | {right / max(1, called):.3f} | {others} |")
    show_misses()


def show_misses() -> None:
    """What was not found, or was found where nothing is."""
    from luthier.privacy.find import find

    for one in (*marked(), *unusual()):
        found = tuple((span.kind, one.text[span.begin : span.end]) for span in find(one.text))
        if found != one.values:
            print(f"# {one.language}: {one.text[:100]!r} -> {found}")


if __name__ == "__main__":
    main()
