// SPDX-License-Identifier: Apache-2.0
#include "network/crypto.h"

#include <dlfcn.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "core/error.h"

namespace crossdock::network {
namespace {

constexpr const char* kVariable = "CROSSDOCK_CRYPTO_LIBRARY";
constexpr const char* kName = "libcrypto.so.3";

#define CROSSDOCK_CRYPTO_FUNCTIONS(of)                                                                           \
    of(OPENSSL_init_crypto) of(EVP_sha256) of(EVP_Digest) of(HMAC) of(EVP_PKEY_new_raw_private_key)              \
        of(EVP_PKEY_new_raw_public_key) of(EVP_PKEY_get_raw_public_key) of(EVP_PKEY_free) of(EVP_PKEY_CTX_new)   \
            of(EVP_PKEY_CTX_free) of(EVP_PKEY_derive_init) of(EVP_PKEY_derive_set_peer) of(EVP_PKEY_derive)      \
                of(EVP_chacha20_poly1305) of(EVP_CIPHER_CTX_new) of(EVP_CIPHER_CTX_free) of(EVP_CIPHER_CTX_ctrl) \
                    of(EVP_EncryptInit_ex) of(EVP_EncryptUpdate) of(EVP_EncryptFinal_ex) of(EVP_DecryptInit_ex)  \
                        of(EVP_DecryptUpdate) of(EVP_DecryptFinal_ex)

struct Library {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a declared name has none
#define CROSSDOCK_CRYPTO_MEMBER(name) decltype(&::name) name = nullptr;
    CROSSDOCK_CRYPTO_FUNCTIONS(CROSSDOCK_CRYPTO_MEMBER)
#undef CROSSDOCK_CRYPTO_MEMBER
};

Library open_library() {
    const char* named = std::getenv(kVariable);
    const char* file = named != nullptr && *named != '\0' ? named : kName;
    void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* reason = dlerror();
        fail(ncclInvalidUsage,
             "cannot open {}, with which ranks of several hosts authenticate each other ({}): install OpenSSL 3 "
             "(Debian: libssl3), or set {} to the file",
             file, reason != nullptr ? reason : "no reason given", kVariable);
    }
    Library found;
    const auto resolve = [&](auto& function, const char* name) {
        void* symbol = dlsym(library, name);
        require(symbol != nullptr, ncclInvalidUsage, "{} lacks {}: OpenSSL 3 is needed", file, name);
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
    };
#define CROSSDOCK_CRYPTO_RESOLVE(name) resolve(found.name, #name);
    CROSSDOCK_CRYPTO_FUNCTIONS(CROSSDOCK_CRYPTO_RESOLVE)
#undef CROSSDOCK_CRYPTO_RESOLVE
    // Threads of this library may use it while the program exits. No effect if the program uses it, too.
    found.OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
    return found;
}

const Library& crypto() {
    static const Library library = open_library();
    return library;
}

void require_done(bool is_done, const char* what) {
    require(is_done, ncclSystemError, "OpenSSL refuses {}, with which ranks of several hosts authenticate each other",
            what);
}

const unsigned char* in(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }
unsigned char* out(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }

template <class Object>
using Owned = std::unique_ptr<Object, void (*)(Object*)>;

Owned<EVP_PKEY> secret_key(const Key& secret) {
    Owned<EVP_PKEY> key(
        crypto().EVP_PKEY_new_raw_private_key(EVP_PKEY_X25519, nullptr, in(secret.data()), secret.size()),
        crypto().EVP_PKEY_free);
    require_done(key != nullptr, "X25519");
    return key;
}

// As the Noise specification says: 32 zero bits and the number.
std::array<unsigned char, 12> nonce_of(uint64_t number) {
    std::array<unsigned char, 12> nonce = {};
    for (size_t i = 0; i < sizeof(number); ++i) nonce[4 + i] = static_cast<unsigned char>(number >> (8 * i));
    return nonce;
}

Owned<EVP_CIPHER_CTX> new_cipher() {
    Owned<EVP_CIPHER_CTX> cipher(crypto().EVP_CIPHER_CTX_new(), crypto().EVP_CIPHER_CTX_free);
    require_done(cipher != nullptr, "ChaCha20-Poly1305");
    return cipher;
}

}  // namespace

void fill_random(std::span<std::byte> bytes) {
    while (!bytes.empty()) {
        const ssize_t got = getrandom(bytes.data(), bytes.size(), 0);
        if (got < 0 && errno == EINTR) continue;
        require(got > 0, ncclSystemError, "no random numbers from the kernel: {}", std::strerror(errno));
        bytes = bytes.subspan(static_cast<size_t>(got));
    }
}

uint64_t random_number() {
    uint64_t number;
    fill_random(std::as_writable_bytes(std::span(&number, 1)));
    return number;
}

Key sha256(ByteSpan bytes) {
    Key hash;
    require_done(
        crypto().EVP_Digest(bytes.data(), bytes.size(), out(hash.data()), nullptr, crypto().EVP_sha256(), nullptr) == 1,
        "SHA-256");
    return hash;
}

Key hmac_sha256(const Key& key, std::initializer_list<ByteSpan> parts) {
    std::vector<std::byte> bytes;
    for (const ByteSpan& part : parts) bytes.insert(bytes.end(), part.begin(), part.end());
    Key hash;
    const unsigned char* made = crypto().HMAC(crypto().EVP_sha256(), key.data(), static_cast<int>(key.size()),
                                              in(bytes.data()), bytes.size(), out(hash.data()), nullptr);
    if (!bytes.empty()) explicit_bzero(bytes.data(), bytes.size());
    require_done(made != nullptr, "HMAC with SHA-256");
    return hash;
}

KeyPair key_pair_of(const Key& secret) {
    KeyPair pair{secret, {}};
    size_t size = pair.shared.size();
    require_done(crypto().EVP_PKEY_get_raw_public_key(secret_key(secret).get(), out(pair.shared.data()), &size) == 1,
                 "X25519");
    return pair;
}

KeyPair make_key_pair() {
    Key secret;
    fill_random(secret);
    return key_pair_of(secret);
}

std::optional<Key> agree(const Key& secret, const Key& shared) {
    const Owned<EVP_PKEY> own = secret_key(secret);
    const Owned<EVP_PKEY> peer(
        crypto().EVP_PKEY_new_raw_public_key(EVP_PKEY_X25519, nullptr, in(shared.data()), shared.size()),
        crypto().EVP_PKEY_free);
    const Owned<EVP_PKEY_CTX> context(crypto().EVP_PKEY_CTX_new(own.get(), nullptr), crypto().EVP_PKEY_CTX_free);
    require_done(peer != nullptr && context != nullptr && crypto().EVP_PKEY_derive_init(context.get()) == 1 &&
                     crypto().EVP_PKEY_derive_set_peer(context.get(), peer.get()) == 1,
                 "X25519");
    Key agreed;
    size_t size = agreed.size();
    if (crypto().EVP_PKEY_derive(context.get(), out(agreed.data()), &size) != 1) return std::nullopt;
    return agreed;
}

void encrypt(const Key& key, uint64_t number, ByteSpan context, ByteSpan plain, std::byte* sealed) {
    const Owned<EVP_CIPHER_CTX> cipher = new_cipher();
    const auto nonce = nonce_of(number);
    int size = 0;
    // Null stands for the context, so that an empty text needs a place.
    std::byte nowhere[kTagBytes];
    const bool is_done =
        crypto().EVP_EncryptInit_ex(cipher.get(), crypto().EVP_chacha20_poly1305(), nullptr, in(key.data()),
                                    nonce.data()) == 1 &&
        (context.empty() || crypto().EVP_EncryptUpdate(cipher.get(), nullptr, &size, in(context.data()),
                                                       static_cast<int>(context.size())) == 1) &&
        (plain.empty() || crypto().EVP_EncryptUpdate(cipher.get(), out(sealed), &size, in(plain.data()),
                                                     static_cast<int>(plain.size())) == 1) &&
        crypto().EVP_EncryptFinal_ex(cipher.get(), out(nowhere), &size) == 1 &&
        crypto().EVP_CIPHER_CTX_ctrl(cipher.get(), EVP_CTRL_AEAD_GET_TAG, kTagBytes, sealed + plain.size()) == 1;
    require_done(is_done, "ChaCha20-Poly1305");
}

bool decrypt(const Key& key, uint64_t number, ByteSpan context, ByteSpan sealed, std::byte* plain) {
    if (sealed.size() < kTagBytes) return false;
    const ByteSpan text = sealed.first(sealed.size() - kTagBytes);
    const Owned<EVP_CIPHER_CTX> cipher = new_cipher();
    const auto nonce = nonce_of(number);
    int size = 0;
    std::byte tag[kTagBytes];
    std::copy_n(sealed.end() - kTagBytes, kTagBytes, tag);
    const bool is_begun =
        crypto().EVP_DecryptInit_ex(cipher.get(), crypto().EVP_chacha20_poly1305(), nullptr, in(key.data()),
                                    nonce.data()) == 1 &&
        (context.empty() || crypto().EVP_DecryptUpdate(cipher.get(), nullptr, &size, in(context.data()),
                                                       static_cast<int>(context.size())) == 1) &&
        (text.empty() || crypto().EVP_DecryptUpdate(cipher.get(), out(plain), &size, in(text.data()),
                                                    static_cast<int>(text.size())) == 1) &&
        crypto().EVP_CIPHER_CTX_ctrl(cipher.get(), EVP_CTRL_AEAD_SET_TAG, kTagBytes, tag) == 1;
    require_done(is_begun, "ChaCha20-Poly1305");
    std::byte nowhere[kTagBytes];
    return crypto().EVP_DecryptFinal_ex(cipher.get(), out(nowhere), &size) == 1;
}

}  // namespace crossdock::network
