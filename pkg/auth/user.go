package auth

import (
	"fmt"
	"strings"
)

// User is one user of a server.
type User struct {
	Name string `json:"name"`
	Role Role   `json:"role"`
	// Key is the public key. Only the user's file has the secret one.
	Key string `json:"key"`
}

// Rights returns the server's permissions of the user.
func (u *User) Rights() (Rights, error) {
	g, ok := GrantOf(u.Role)
	if !ok {
		return Rights{}, fmt.Errorf("role: %q; must be one of %s", u.Role, strings.Join(RoleNames(), ", "))
	}
	return g.rights(u), nil
}
