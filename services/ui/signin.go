package ui

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"net"
	"net/http"
	"strings"
)

// TokenQuery begins what follows the address of a page in a link that signs a browser in.
const TokenQuery = "?token="

// session returns the name and the value of the cookie of browsers that have given the token. The value does not tell
// the token, and is another one at each start where the token is. Browsers send the cookies of a host to all of its
// ports, so the name has the port.
func (s *server) session(r *http.Request) (name, value string) {
	port := ""
	if at, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
		_, port, _ = net.SplitHostPort(at.String())
	}
	of := hmac.New(sha256.New, []byte(s.cfg.Token))
	of.Write([]byte("session of a page of meander"))
	return "meander-" + port, hex.EncodeToString(of.Sum(nil))
}

// signedIn reports whether a request has the cookie of a browser that gave the token; or the token itself, as programs
// send it: Authorization, as Bearer, or as Basic with any name.
func (s *server) signedIn(r *http.Request) bool {
	name, value := s.session(r)
	if c, err := r.Cookie(name); err == nil && subtle.ConstantTimeCompare([]byte(c.Value), []byte(value)) == 1 {
		return true
	}
	given, bearer := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !bearer {
		_, given, _ = r.BasicAuth()
	}
	return s.isToken(given)
}

// givesToken reports whether a request is a link with a token, or the form that asks for it.
func givesToken(r *http.Request) bool {
	return r.URL.Path == "/" && (r.Method == http.MethodPost || r.URL.Query().Has("token"))
}

// isToken compares without telling by its time how much is right.
func (s *server) isToken(given string) bool {
	return subtle.ConstantTimeCompare([]byte(given), []byte(s.cfg.Token)) == 1
}

// signIn answers who has not signed in: with the page that asks for the token, or, where a link or that page gives it,
// with the cookie and the page without the token in its address. Other questions are refused.
func (s *server) signIn(w http.ResponseWriter, r *http.Request) {
	given, asks := "", r.URL.Path == "/"
	switch {
	case r.Method == http.MethodPost && asks:
		if new(http.CrossOriginProtection).Check(r) != nil {
			writeError(w, http.StatusForbidden, "only the page itself may sign in")
			return
		}
		if !readBody(w, r) {
			return
		}
		given = r.PostFormValue("token")
	case r.Method == http.MethodGet && asks:
		given = r.URL.Query().Get("token")
	case r.Method == http.MethodGet && (r.URL.Path == "/style.css" || r.URL.Path == "/icon.svg"):
		http.ServeFileFS(w, r, page, "page"+r.URL.Path)
		return
	}
	given = strings.TrimSpace(given)
	switch {
	case !asks:
		w.Header().Set("WWW-Authenticate", `Bearer realm="meander"`)
		writeError(w, http.StatusUnauthorized, "the page asks for a token: open the link that the command printed")
	case s.isToken(given):
		name, value := s.session(r)
		http.SetCookie(w, &http.Cookie{
			Name: name, Value: value, Path: "/", HttpOnly: true, SameSite: http.SameSiteLaxMode,
			Secure: r.Header.Get("X-Forwarded-Proto") == "https", // of a proxy: the page has no TLS of its own
		})
		http.Redirect(w, r, "/", http.StatusSeeOther)
	default:
		form, err := page.ReadFile("page/signin.html")
		if err != nil {
			panic(err) // it is embedded
		}
		if given != "" {
			form = bytes.Replace(form, []byte(`id="wrong" hidden`), []byte(`id="wrong"`), 1)
		}
		w.Header().Set("WWW-Authenticate", `Bearer realm="meander"`)
		w.Header().Set("Content-Security-Policy",
			strings.Replace(policy, "form-action 'none'", "form-action 'self'", 1))
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.WriteHeader(http.StatusUnauthorized)
		s.write(w, form)
	}
}
